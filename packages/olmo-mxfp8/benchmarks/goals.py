"""What the numbers are to reach, as ratios within a cell."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cells import Cell

OURS, COPY, BF16 = "ours", "copy", "bf16, olmo-experts-gemm"
BF16_PRODUCTS = ("bf16, torch", BF16)
"""What every product of ours is judged beside: a goal beside the slower of them is half a goal."""
CACHES = ("weight cache", "weight cache by 128x128")


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio of two contenders of one kind of cell.

    Attributes:
        topic: Of the cells.
        what: Of the cells.
        ours: The contender above the line.
        peer: The one below.
        least: The first bar.
        aim: Where it should come to.
        by: `"rate"`, work a second; `"speed"`, the same work in less time; `"bytes"`, the less the
            better.
    """

    topic: str
    what: str
    ours: str
    peer: str
    least: float
    aim: float
    by: str = "speed"

    def ratio(self, cell: Cell) -> float | None:
        """Of one cell, or None where a contender is missing."""
        ours, peer = cell.median(self.ours), cell.median(self.peer)
        if not ours or not peer:
            return None
        if self.by == "bytes":
            return ours / peer
        if self.by == "speed":
            return peer / ours
        mine, theirs = cell.rate(self.ours), cell.rate(self.peer)
        return mine / theirs if mine and theirs else None

    def is_met(self, ratio: float) -> bool:
        """Whether the first bar is reached."""
        return ratio <= self.least if self.by == "bytes" else ratio >= self.least


GOALS = (
    *(
        Goal("quantise", what, OURS, COPY, 0.90, 0.97, by="rate")
        for what in ("rows", "columns", "both", "SwiGLU", "SwiGLU backward", "dequantise", *CACHES)
    ),
    Goal("quantise", "rows", OURS, "olmo-core", 1.0, 1.0),
    Goal("quantise", "rows", OURS, "torchao", 1.0, 1.0),
    Goal("quantise", "columns", OURS, "torchao", 1.0, 1.0),
    Goal("quantise", "both", OURS, "two passes", 1.3, 1.45),
    *(Goal("quantise", what, OURS, "two quantisations", 1.3, 1.45) for what in CACHES),
    *(
        Goal("product", "forward", ours, peer, least, aim)
        for ours, least, aim in (
            ("dequantise, weights cached", 0.92, 0.97),
            ("coarse + quantise", 1.20, 1.35),
            ("coarse", 1.35, 1.50),
        )
        for peer in BF16_PRODUCTS
    ),
    Goal("experts", "forward+backward", "coarse", BF16, 1.10, 1.25),
    Goal("memory", "held for backward", "coarse, hidden in MXFP8", BF16, 0.55, 0.52, by="bytes"),
)


def worst(goal: Goal, cells: Iterable[Cell]) -> tuple[float, Cell, int] | None:
    """The ratio farthest from the goal, its cell, and of how many; None where there is none."""
    found = [
        (ratio, cell)
        for cell in cells
        if (cell.topic, cell.what) == (goal.topic, goal.what)
        and (ratio := goal.ratio(cell)) is not None
    ]
    if not found:
        return None
    pick = max if goal.by == "bytes" else min
    ratio, cell = pick(found, key=lambda pair: pair[0])
    return ratio, cell, len(found)


def winning_widths(cells: Iterable[Cell]) -> Iterator[tuple[str, bool]]:
    """Each width, and whether coarse with quantisation beats both BF16 products there."""
    for cell in cells:
        ours = cell.median("coarse + quantise")
        peers = [m for name in BF16_PRODUCTS if (m := cell.median(name))]
        if cell.topic == "width" and ours and peers:
            yield cell.shape, ours < min(peers)
