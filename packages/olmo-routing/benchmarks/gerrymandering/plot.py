"""The runs as one SVG file, written by hand: a panel a quantity, a colour an arm, a line a seed."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from training import Point, Run

# What, its title, and the lowest and highest value worth showing.
_PANELS = (
    ("language_loss", "language loss, nats a byte (held out)", 0.0, math.inf),
    ("worst_load", "busiest expert / mean, worst layer", 0.9, 3.5),
    ("ordinary_loss", "ordinary balance loss E f.P (1 = balanced)", 0.996, 1.01),
    ("trained_loss", "the arm's own balance loss", 0.99, 1.2),
    ("honesty", "honesty (1 honest, 0 blind, below 0 gerrymandered)", -0.5, 1.5),
    ("topk_margin", "K-th less next score", 0.0, math.inf),
)
# Warm then cold: the default arms are four ordinary ones and four of the margin.
_COLOURS = ("#7f0000", "#d62728", "#ff9f6b", "#e6b800", "#08306b", "#1f77b4", "#6baed6", "#2ca02c")
_WIDTH, _HEIGHT, _LEFT, _TOP, _COLUMNS = 360, 190, 60, 40, 2


def draw(runs: Sequence[Run]) -> str:
    """Return the picture, in which the first tenth of the steps sets no scale."""
    names = list(dict.fromkeys(run.arm.name for run in runs))
    colours = dict(zip(names, _COLOURS * (1 + len(names) // len(_COLOURS)), strict=False))
    rows = -(-len(_PANELS) // _COLUMNS)
    width, height = _COLUMNS * (_WIDTH + _LEFT + 20), _TOP + rows * (_HEIGHT + 60)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, name in enumerate(names):
        x = 20 + 108 * number
        parts.append(f'<path d="M{x} 16H{x + 20}" stroke="{colours[name]}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 26}" y="20">{escape(name)}</text>')
    for number, panel in enumerate(_PANELS):
        left = _LEFT + (number % _COLUMNS) * (_WIDTH + _LEFT + 20)
        top = _TOP + 20 + (number // _COLUMNS) * (_HEIGHT + 60)
        parts += _panel(runs, panel, colours, left, top)
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    runs: Sequence[Run],
    panel: tuple[str, str, float, float],
    colours: Mapping[str, str],
    left: int,
    top: int,
) -> list[str]:
    quantity, title, floor, ceiling = panel
    last = max(run.points[-1].step for run in runs)

    def value(point: Point) -> float:
        return float(getattr(point, quantity))

    shown = [value(p) for run in runs for p in run.points if p.step >= last / 10]
    shown = [v for v in shown if math.isfinite(v)] or [0.0]
    low, high = min(shown), max(shown)
    margin = 0.05 * (high - low) or 0.5
    low, high = max(low - margin, floor), min(high + margin, ceiling)

    def place(point: Point) -> str:
        y = min(max((high - value(point)) / (high - low), 0.0), 1.0)
        return f"{left + _WIDTH * point.step / max(last, 1):.1f},{top + _HEIGHT * y:.1f}"

    parts = [
        f'<text x="{left}" y="{top - 7}">{escape(title)}</text>',
        f'<rect x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
        'stroke="#999999"/>',
        f'<text x="{left + _WIDTH}" y="{top + _HEIGHT + 15}" text-anchor="end">{last} steps</text>',
    ]
    for part in range(5):
        y = top + _HEIGHT * part / 4
        label = f"{high - (high - low) * part / 4:.4g}"
        parts.append(f'<path d="M{left} {y}h{_WIDTH}" stroke="#eeeeee"/>')
        parts.append(f'<text x="{left - 5}" y="{y + 4}" text-anchor="end">{label}</text>')
    for run in runs:
        points = " ".join(place(point) for point in run.points if math.isfinite(value(point)))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colours[run.arm.name]}" '
            'stroke-width="1.4" stroke-opacity="0.85"/>'
        )
    return parts
