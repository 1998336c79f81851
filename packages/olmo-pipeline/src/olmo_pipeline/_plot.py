"""Draw a schedule the usual way: a row per rank, time to the right, a box per action.

A box has the colour of its kind (forward blue, whole backward green, input gradient teal, weight
gradient orange; later chunks of a rank paler) and the number of its microbatch; white is idle time.
Beside each row stands the peak of live activations, below all what the colours mean. SVG is written
here, PNG by `_png_encoder`; neither needs another package.
"""

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from ._png_encoder import write_png
from ._schedule import Action, Kind, Schedule
from ._simulate import Timeline, simulate

Colour = tuple[int, int, int]

_COLOUR: dict[Kind, Colour] = {
    "forward": (74, 134, 216),
    "backward": (98, 168, 92),
    "input_gradient": (72, 178, 172),
    "weight_gradient": (236, 158, 74),
}
_ROW, _GAP, _LEFT, _RIGHT, _TOP = 24, 4, 64, 80, 40  # pixels
_MEAN_WIDTH = 20.0  # pixels of a mean action, before the picture would be too wide
_WIDEST = 12_000


class Box(NamedTuple):
    """A filled rectangle in pixels, with text in its middle."""

    left: float
    top: float
    right: float
    bottom: float
    colour: Colour
    text: str


class Label(NamedTuple):
    """Text whose left end and vertical middle are given in pixels."""

    left: float
    middle: float
    text: str


class Picture(NamedTuple):
    """What is drawn, whatever the format."""

    width: int
    height: int
    boxes: list[Box]
    labels: list[Label]


def plot(what: Schedule | Timeline, path: str | Path) -> None:
    """Draw to a file.

    Args:
        what: A timeline as `simulate` returns it, or a schedule, which is laid out with the default
            costs.
        path: A name that ends in `.svg` or `.png`.

    Raises:
        ValueError: If the name ends otherwise, or the schedule is not valid.
    """
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"`path` must end in `.svg` or `.png`, got {str(path)!r}.")
    picture = draw(what if isinstance(what, Timeline) else simulate(what))
    if path.suffix == ".svg":
        path.write_text(_to_svg(picture), encoding="utf-8")
    else:
        path.write_bytes(write_png(*picture))


def draw(timeline: Timeline) -> Picture:
    """Lay out the picture of a timeline."""
    schedule = timeline.schedule
    mean = sum(span.end - span.start for span in timeline.spans) / len(timeline.spans)
    scale = min(_MEAN_WIDTH / mean, _WIDEST / timeline.makespan)
    boxes = []
    for span in timeline.spans:
        top = _TOP + span.rank * (_ROW + _GAP)
        left, right = _LEFT + scale * span.start, _LEFT + scale * span.end
        colour = _shade(schedule, span.rank, span.action)
        boxes.append(Box(left, top, right, top + _ROW, colour, str(span.action.microbatch)))
    bubble = f"bubble {100 * timeline.bubble:.1f} %, makespan {timeline.makespan:g}"
    labels = [Label(8, _TOP / 2, f"{schedule.name}: {bubble}")]
    end = _LEFT + scale * timeline.makespan
    for rank, peak in enumerate(timeline.peak_live_per_rank):
        middle = _TOP + rank * (_ROW + _GAP) + _ROW / 2
        labels += [Label(8, middle, f"rank {rank}"), Label(end + 8, middle, f"peak {peak}")]
    height = _TOP + schedule.num_ranks * (_ROW + _GAP) + 8
    left = float(_LEFT)
    for kind in dict.fromkeys(span.action.kind for span in timeline.spans):
        words = kind.replace("_", " ")
        boxes.append(Box(left, height, left + _ROW, height + _ROW, _COLOUR[kind], words[0].upper()))
        labels.append(Label(left + _ROW + 8, height + _ROW / 2, words))
        left += _ROW + 24 + 8.5 * len(words)
    width = max(end + _RIGHT, 16 + 8.5 * len(labels[0].text), left)
    return Picture(round(width), height + _ROW + 8, boxes, labels)


def _shade(schedule: Schedule, rank: int, action: Action) -> Colour:
    """Return the colour of the kind, mixed with white for later chunks."""
    stages = schedule.stages_of(rank)
    white = 0.5 * stages.index(action.stage) / max(1, len(stages) - 1)
    red, green, blue = (round(c + white * (255 - c)) for c in _COLOUR[action.kind])
    return red, green, blue


def _to_svg(picture: Picture) -> str:
    width, height, boxes, labels = picture
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for left, top, right, bottom, (red, green, blue), text in boxes:
        lines.append(
            f'<rect x="{left:.2f}" y="{top:g}" width="{right - left:.2f}" '
            f'height="{bottom - top:g}" fill="rgb({red},{green},{blue})" stroke="white"/>'
            f'<text x="{(left + right) / 2:.2f}" y="{(top + bottom) / 2:g}" '
            f'text-anchor="middle" dominant-baseline="central">{text}</text>'
        )
    for left, middle, text in labels:
        lines.append(
            f'<text x="{left:.2f}" y="{middle:g}" dominant-baseline="central" font-size="13">'
            f"{escape(text)}</text>"
        )
    return "\n".join([*lines, "</svg>"]) + "\n"
