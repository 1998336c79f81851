"""A run as a Markdown report, a plot, and a JSON file with every repeat."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from cells import OURS, Cell
from plot import draw_plot
from summary import Summary, failed, summarise

Facts = dict[str, str]
_CONTENDERS = (OURS, "sonicmoe", "torch")


def write(folder: Path, name: str, runs: Sequence[Facts], cells: Sequence[Cell]) -> list[Path]:
    """Write `name.md`, `name.json` and the plot into `folder`, and return their paths."""
    data = write_numbers(folder, name, runs, cells)
    summaries = summarise(cells, on_h200(runs))
    plot = draw_plot(folder, name, cells)
    text = folder / f"{name}.md"
    text.write_text("\n".join(_lines(name, runs, cells, summaries, plot)) + "\n")
    return [text, data, *([plot] if plot else [])]


def write_numbers(folder: Path, name: str, runs: Sequence[Facts], cells: Sequence[Cell]) -> Path:
    """Write `name.json` alone, from which `read` makes a report again."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"runs": list(runs), "cells": [asdict(c) for c in cells]}) + "\n")
    return path


def read(path: Path, first_run: int) -> tuple[list[Facts], list[Cell]]:
    """Read a JSON file of `write`; its runs are counted from `first_run`."""
    stored = json.loads(path.read_text())
    cells = [Cell(**{**cell, "run": cell["run"] + first_run}) for cell in stored["cells"]]
    return stored["runs"], cells


def on_h200(runs: Sequence[Facts]) -> bool:
    """Whether figures that were recorded on an H200 may stand beside these."""
    return all("H200" in run["hardware"] for run in runs)


def free_name(folder: Path, name: str) -> str:
    """`name`, or `name-2` and so on where a report of that name is there already."""
    names = [name, *(f"{name}-{number}" for number in range(2, 1000))]
    return next(n for n in names if not (folder / f"{n}.json").exists())


def _lines(
    name: str,
    runs: Sequence[Facts],
    cells: Sequence[Cell],
    summaries: Sequence[Summary],
    plot: Path | None,
) -> Iterator[str]:
    yield f"# olmo-experts-gemm on {runs[0]['hardware']}, {runs[0]['date'][:10]}"
    yield ""
    yield (
        "Ours and the peers in turn within each cell (ours, peer, ours, peer, ...), CUDA events, "
        "medians with [least..most]; random normal bfloat16 operands, each result checked against "
        "the peer's (relative error below 2e-2) before it is timed. A ratio is our speed over the "
        "peer's in the same cell: above 1 we are faster. For memory it is our bytes over theirs."
    )
    yield ""
    for number, run in enumerate(runs):
        yield f"Run {number}: `{run['command']}`"
        yield ""
        yield from _table(("fact", "value"), [[k, v] for k, v in run.items() if k != "command"])
    if summaries:
        yield "## Summary"
        yield ""
        yield from _summary(summaries)
    if plot:
        yield f"![Ratios of every cell]({plot.name})"
        yield ""
    for title, topic in (
        ("Grouped products", "product"),
        ("Whole layer: router, experts, combine", "layer"),
        ("Fine-grained layers", "fine"),
    ):
        yield from _section(title, [c for c in cells if c.topic == topic and c.samples])
    yield from _memory([c for c in cells if c.topic == "memory" and c.samples])
    yield from _first_calls([c for c in cells if c.topic == "first call"])
    failures = failed(cells)
    if failures:
        yield "## Failed checks and contenders"
        yield ""
        rows = [[*where, why.replace("|", "/")] for where, why in failures]
        yield from _table(("topic", "shape", "load", "what", "why"), rows)
    yield f"Every repeat: [{name}.json]({name}.json)."


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    head = list(head)
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(" ".join(cell.split()) for cell in row) + " |"
    yield ""


def _summary(summaries: Sequence[Summary]) -> Iterator[str]:
    rows = []
    for s in summaries:
        worst, where = s.worst
        mean = f"**{s.mean:.3f}**"
        count = str(len(s.ratios))
        row = [s.topic, s.what, s.case, s.peer, count, mean, f"{worst:.3f} ({where})", s.goal]
        rows.append(row)
    head = ("topic", "what", "load", "beside", "cells", "geometric mean", "worst cell", "goal")
    yield from _table(head, rows)


def _section(title: str, cells: Sequence[Cell]) -> Iterator[str]:
    if not cells:
        return
    names = [name for name in _CONTENDERS if any(name in cell.samples for cell in cells)]
    peers = [name for name in names if name != OURS]
    yield f"## {title}"
    yield ""
    head = ["shape", "load", "busiest / mean", "what", "repeats"]
    head += [f"{name}, TFLOP/s" for name in names] + [f"ours / {peer}" for peer in peers]
    head += [f"{name}, ms" for name in names] + ["largest error", "run"]
    rows = []
    for cell in cells:
        row = [cell.shape, cell.case, f"{cell.imbalance:.2f}", cell.what]
        row.append(str(len(next(iter(cell.samples.values())))))
        row += [_number(cell.tflops(name), ".1f") for name in names]
        row += [_number(cell.ratio(peer), ".3f") for peer in peers]
        row += [_spread(cell, name) for name in names]
        row += [f"{max(cell.errors.values(), default=0.0):.1e}", str(cell.run)]
        rows.append(row)
    yield from _table(head, rows)
    if any(cell.host_ms for cell in cells):
        yield from _host(cells, names)


def _host(cells: Sequence[Cell], names: Sequence[str]) -> Iterator[str]:
    yield "Time until the host has launched one repeat, which hides behind the device while it is"
    yield "the smaller of the two:"
    yield ""
    rows = [
        [c.shape, c.case, c.what, *(_number(c.host_ms.get(name), ".3f") for name in names)]
        for c in cells
    ]
    yield from _table(["shape", "load", "what", *(f"{name}, host ms" for name in names)], rows)


def _memory(cells: Sequence[Cell]) -> Iterator[str]:
    if not cells:
        return
    names = [name for name in _CONTENDERS if any(name in cell.samples for cell in cells)]
    peers = [name for name in names if name != OURS]
    yield "## Memory above weights and inputs"
    yield ""
    yield "`held`: from the forward to the backward pass, the output included; `peak`: of both,"
    yield "the gradients of the weights included."
    yield ""
    rows = []
    for cell in cells:
        gib = [(cell.median(name) or 0.0) / 2**30 for name in names]
        row = [cell.shape, cell.what, *(f"{value:.3f}" if value else "-" for value in gib)]
        rows.append(row + [_number(cell.ratio(peer), ".3f") for peer in peers])
    head = ["shape", "what", *(f"{name}, GiB" for name in names)]
    yield from _table(head + [f"ours / {peer}" for peer in peers], rows)


def _first_calls(cells: Sequence[Cell]) -> Iterator[str]:
    if not cells:
        return
    yield "## First forward and backward pass"
    yield ""
    yield "Seconds with everything that is compiled or tuned in it, shape after shape in one"
    yield "process; the facts above say whether Triton's cache was empty when it began."
    yield ""
    seconds: dict[tuple[int, str], dict[str, float]] = {}
    for cell in cells:
        for name, samples in cell.samples.items():
            seconds.setdefault((cell.run, cell.shape), {})[name] = samples[0]
    names = [name for name in _CONTENDERS if any(name in row for row in seconds.values())]
    rows = [
        [str(run), shape, *(_number(row.get(name), ".1f") for name in names)]
        for (run, shape), row in seconds.items()
    ]
    yield from _table(["run", "shape", *(f"{name}, s" for name in names)], rows)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _spread(cell: Cell, name: str) -> str:
    samples, median = cell.samples.get(name), cell.median(name)
    if not samples or median is None:
        return "-"
    return f"{median:.3f} [{min(samples):.3f}..{max(samples):.3f}]"
