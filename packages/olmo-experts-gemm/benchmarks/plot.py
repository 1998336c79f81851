"""One picture of a run: our speed over the peer's, a dot a cell."""

import importlib.util
from collections.abc import Sequence
from html import escape
from pathlib import Path

from cells import OURS, Cell

_COLOURS = {
    "forward": "#1f77b4",
    "dgrad": "#ff7f0e",
    "wgrad": "#2ca02c",
    "forward+backward": "#d62728",
}
_PREFERRED_PEERS = ("sonicmoe", "torch")
_TITLE = "Speed of ours over the peer's, same cell (right of 1: faster)"

Row = tuple[str, list[tuple[str, float]]]


def draw_plot(folder: Path, name: str, cells: Sequence[Cell]) -> Path | None:
    """Draw with matplotlib where it is installed, by hand where it is not; None without ratios."""
    rows = _rows(cells)
    if not rows:
        return None
    path = folder / f"{name}.svg"
    if importlib.util.find_spec("matplotlib"):
        _by_matplotlib(path, rows)
    else:
        path.write_text(_by_hand(rows))
    return path


def _rows(cells: Sequence[Cell]) -> list[Row]:
    """A label, and the ratios under it, for each shape and load; beside the best peer there is."""
    rows: dict[str, list[tuple[str, float]]] = {}
    for cell in cells:
        peer = next((peer for peer in _PREFERRED_PEERS if peer in cell.samples), None)
        ratio = cell.ratio(peer) if peer and OURS in cell.samples and cell.unit == "ms" else None
        if ratio is not None and cell.what in _COLOURS:
            label = f"{cell.topic} {cell.shape} {cell.case} / {peer}"
            rows.setdefault(label, []).append((cell.what, ratio))
    return list(rows.items())


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    ratios = [ratio for _, points in rows for _, ratio in points]
    return min(0.9, *ratios) - 0.03, max(1.1, *ratios) + 0.03


def _by_matplotlib(path: Path, rows: Sequence[Row]) -> None:
    import matplotlib

    matplotlib.use("agg")
    # Text stays text, and without salt and date the same numbers would not give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ratios"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.24 * len(rows)), layout="constrained")
    for y, (_, points) in enumerate(rows):
        for what, ratio in points:
            axes.plot(ratio, y, "o", color=_COLOURS[what], markersize=5)
    for what in dict.fromkeys(what for _, points in rows for what, _ in points):
        axes.plot([], [], "o", color=_COLOURS[what], label=what)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlim(*_limits(rows))
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(_TITLE, fontsize=9)
    figure.legend(loc="outside lower right", ncols=4, fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _by_hand(rows: Sequence[Row]) -> str:
    left, width, top, step = 400, 440, 50, 18
    bottom = top + step * len(rows)
    low, high = _limits(rows)

    def x_of(ratio: float) -> float:
        return left + width * (ratio - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 30}" '
        f'height="{bottom + 50}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="20">{escape(_TITLE)}</text>',
    ]
    # At most about nine lines, however wide the ratios lie apart.
    spacing = next(s for s in (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 1e9) if (high - low) / s <= 9)
    ticks = [n * spacing for n in range(int(high / spacing) + 1) if n * spacing >= low]
    for tick in sorted({1.0, *ticks}):
        colour = "black" if tick == 1.0 else "#dddddd"
        x = f"{x_of(tick):.1f}"
        parts.append(f'<path d="M{x} {top - 10}V{bottom}" stroke="{colour}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 15}" text-anchor="middle">{tick:.2f}</text>')
    for number, (label, points) in enumerate(rows):
        y = top + step * number
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{escape(label)}</text>')
        for what, ratio in points:
            parts.append(f'<circle cx="{x_of(ratio):.1f}" cy="{y}" r="4" fill="{_COLOURS[what]}"/>')
    for number, (what, colour) in enumerate(_COLOURS.items()):
        x = left + 115 * number
        parts.append(f'<circle cx="{x}" cy="{bottom + 35}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 9}" y="{bottom + 39}">{what}</text>')
    return "\n".join([*parts, "</svg>", ""])
