"""Write the rows of a measurement as a CSV file, a page and two pictures."""

import csv
from collections.abc import Callable
from pathlib import Path

from measure import Row
from olmo_pipeline import simulate, v_shape

COLOURS = (
    "#8c8c8c", "#4a86d8", "#1f4e9c", "#d84a4a", "#72c2b2", "#1f8c6c", "#c29a2a",
    "#f0a0a0", "#e07878", "#b03030", "#b8a0e0", "#9070d0", "#6040b0",
)  # fmt: skip


def write_report(rows: list[Row], folder: Path) -> None:
    """Write `table.csv`, `summary.md`, `bubble.svg` and `peak.svg`."""
    with (folder / "table.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        for row in rows:
            writer.writerow(f"{x:.6g}" if isinstance(x, float) else x for x in row)
    (folder / "summary.md").write_text(_summary(rows), encoding="utf-8")
    bubble = _chart(
        rows, "idle share of all rank-time, %", lambda row: 100 * row.bubble, _published_bubble
    )
    (folder / "bubble.svg").write_text(bubble, encoding="utf-8")
    # GPipe keeps 2 m, which would press all other lines together.
    others = [row for row in rows if row.schedule != "gpipe"]
    title = "live activations on the fullest rank, per P"
    peak = _chart(others, title, _peak_per_rank, _published_peak)
    (folder / "peak.svg").write_text(peak, encoding="utf-8")


def _peak_per_rank(row: Row) -> float:
    return row.peak / row.num_ranks


def _published_bubble(row: Row) -> float | None:
    if row.published_idle is None:
        return None
    work = row.makespan - row.idle
    return 100 * row.published_idle / (row.published_idle + work)


def _published_peak(row: Row) -> float | None:
    return None if row.published_peak is None else row.published_peak / row.num_ranks


def _summary(rows: list[Row]) -> str:
    differing = [
        row
        for row in rows
        if row.published_idle is not None
        and (abs(row.idle - row.published_idle) > 1e-9 or row.peak != row.published_peak)
    ]
    searched = [row for row in rows if row.bound is not None]
    proved = [row for row in searched if row.makespan <= row.bound + 1e-6]
    lines = [
        "# Bubble and peak of every schedule",
        "",
        "Made by `python packages/olmo-pipeline/benchmarks`. Counts, not timings: the search has a "
        "fixed seed, so that every machine gets the same.",
        "",
        "Forward, input gradient and weight gradient cost 1 unit a stage of two chunks a rank (2 "
        "units with one chunk). Idle: makespan less the work of a rank, in units. Peak: live "
        "activations on the fullest rank, in stages of two chunks a rank. In brackets the "
        "published formula where it holds; zero_bubble v with the stagger of P - 1 units that its "
        "0 leaves out. A star: least possible under the cap (equal to the lower bound).",
        "",
        f"{len(proved)} of {len(searched)} searched schedules are proved best. Of "
        f"{sum(row.published_idle is not None for row in rows)} published values "
        f"{len(differing)} differ: {_names(differing)}. Its formula takes a forward beside a "
        "backward as one step that ends for both at once; here the two are actions in turn, and "
        "who waits for the first does not wait for the second, which halves the idle time.",
        "",
        _of_the_report(),
        "",
    ]
    for count in (8, 64):
        for num_ranks in (4, 8, 16):
            lines += [f"## {num_ranks} ranks, {count} microbatches", ""]
            lines += ["| schedule | idle | bubble | peak |", "|---|---|---|---|"]
            for row in rows:
                if (row.num_ranks, row.num_microbatches) == (num_ranks, count):
                    lines.append(_line(row))
            lines.append("")
    return "\n".join(lines)


def _of_the_report() -> str:
    """What is published of `v_shape` has a backward as long as a forward; no other row here has."""
    timeline = simulate(v_shape(4, 8), forward=1.0, backward=1.0)
    peaks = "/".join(map(str, timeline.peak_live_per_rank))
    return (
        "Of v_shape 23.8 % and peaks of 6 are published, for 4 ranks and 8 microbatches and a "
        f"backward as long as a forward: with these {100 * timeline.bubble:.1f} % and {peaks}."
    )


def _line(row: Row) -> str:
    idle = f"{row.idle:g}" + ("" if row.published_idle is None else f" ({row.published_idle:g})")
    peak = f"{row.peak}" + ("" if row.published_peak is None else f" ({row.published_peak})")
    star = " *" if row.bound is not None and row.makespan <= row.bound + 1e-6 else ""
    return f"| {row.schedule} | {idle}{star} | {100 * row.bubble:.1f} % | {peak} |"


def _names(rows: list[Row]) -> str:
    return ", ".join(sorted({row.schedule for row in rows})) or "none"


def _chart(
    rows: list[Row],
    title: str,
    value: Callable[[Row], float],
    published: Callable[[Row], float | None],
) -> str:
    """Return an SVG with a panel per number of ranks: microbatches to the right, a line each.

    Where a formula is published and holds, a ring has its value.
    """
    ranks = sorted({row.num_ranks for row in rows})
    counts = sorted({row.num_microbatches for row in rows})
    names = list(dict.fromkeys(row.schedule for row in rows))
    wide, high, top = 190, 240, 50
    width, height = 60 + len(ranks) * wide + 180, top + high + 50
    most = max([*map(value, rows), *(level for row in rows if (level := published(row)))])
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11"><rect width="{width}" height="{height}" '
        f'fill="white"/><text x="60" y="20" font-size="14">{title}; to the right: microbatches; '
        f"rings: published formulas</text>"
    ]
    for tick in range(5):
        level, y = most * tick / 4, top + high * (1 - tick / 4)
        out.append(f'<text x="50" y="{y + 4:.1f}" text-anchor="end">{level:.3g}</text>')
        right = 60 + len(ranks) * wide - 20
        out.append(f'<path d="M60 {y:.1f}H{right}" stroke="#ddd" fill="none"/>')
    for panel, num_ranks in enumerate(ranks):
        left = 60 + panel * wide
        out.append(f'<text x="{left}" y="{top - 8}">{num_ranks} ranks</text>')
        xs = {c: left + (wide - 20) * i / max(1, len(counts) - 1) for i, c in enumerate(counts)}
        for count, x in xs.items():
            y = top + high + 16
            out.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{count}</text>')
        for colour, name in zip(COLOURS[-len(names) :], names, strict=True):
            points = " ".join(
                f"{xs[row.num_microbatches]:.1f},{top + high * (1 - value(row) / most):.1f}"
                for row in rows
                if (row.num_ranks, row.schedule) == (num_ranks, name)
            )
            out.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
            )
            for row in rows:
                if (row.num_ranks, row.schedule) != (num_ranks, name):
                    continue
                if (formula := published(row)) is not None:
                    x, y = xs[row.num_microbatches], top + high * (1 - formula / most)
                    out.append(
                        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="none" stroke="{colour}"/>'
                    )
    for number, (colour, name) in enumerate(zip(COLOURS[-len(names) :], names, strict=True)):
        x, y = 60 + len(ranks) * wide, top + 10 + 18 * number
        out.append(f'<path d="M{x} {y - 4}h20" stroke="{colour}" stroke-width="3"/>')
        out.append(f'<text x="{x + 26}" y="{y}">{name}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
