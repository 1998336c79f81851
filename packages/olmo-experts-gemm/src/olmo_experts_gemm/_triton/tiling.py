"""How a product is cut into tiles.

A persistent program computes one output tile after another. Tiles are numbered so that
`group` of them down a column of tiles are neighbours: they share one slice of the weights, and
programs that run at the same time find it in the L2 cache.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """One configuration of a kernel.

    Attributes:
        rows: Height of an output tile.
        columns: Width of the accumulator.
        inner: Depth of one step of the inner loop.
        warps: Warps a program.
        stages: Steps of the inner loop that are in flight.
        programs: Programs a multiprocessor; two of them hide one another's epilogue.
        group: Tiles down a column that are neighbours.
        flatten: Join the loop over tiles and the inner loop, so that the loads of a tile begin
            during the epilogue of the one before.
        pieces: The epilogue handles this many column slices one after another, which bounds its
            registers and its staging memory.
    """

    rows: int
    columns: int
    inner: int = 64
    warps: int = 8
    stages: int = 3
    programs: int = 1
    group: int = 8
    flatten: bool = False
    pieces: int = 1

    @property
    def options(self) -> dict[str, int]:
        """What every kernel of a product takes by keyword."""
        return {
            "BM": self.rows,
            "BN": self.columns,
            "BK": self.inner,
            "GROUP": self.group,
            "PIECES": self.pieces,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }

    def grid(self, device: torch.device) -> tuple[int]:
        """As many programs as run at once."""
        return (self.programs * multiprocessors(device),)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at once."""
    if device.type != "cuda":  # the interpreter
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def generation(device: torch.device) -> int:
    """The major compute capability: 8, 9 (Hopper, the first with TMA), 10; 0 in the interpreter."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


_SMALL = Tiling(rows=32, columns=32, inner=32, warps=4, stages=2)
_AMPERE = Tiling(rows=64, columns=128, inner=32, warps=8, stages=3)


def _older(x: Tensor) -> Tiling:
    return _AMPERE if generation(x.device) else _SMALL


_COPY_FROM = 1024
"""The hidden width from which a copy of the rows costs less than it saves (an H200)."""


def copies_rows(x: Tensor, H: int) -> bool:
    """Whether to copy the gathered rows before they are multiplied, not to gather in each product.

    TMA brings rows that lie ready and, other than a gather, during the epilogue of the tile before.
    What that saves grows with H, what the copy costs does not.
    """
    return generation(x.device) == 9 and H >= _COPY_FROM


def tile_rows(x: Tensor) -> int:
    """The height of the tiles of all products on a device, which so can share a list of tiles."""
    return 128 if generation(x.device) >= 9 else _older(x).rows


def row_product(x: Tensor, F: int, D: int, *, gathered: bool = False) -> Tiling:
    """For `y = x @ w[e].T`, F columns out, D in."""
    if generation(x.device) < 9:
        return _older(x)
    return Tiling(rows=tile_rows(x), columns=256, group=4, flatten=not gathered)


def up_product(x: Tensor, H: int, D: int, *, plain: bool, gathered: bool = True) -> Tiling:
    """For the first product and the activation behind it.

    Only the `plain` case, a gate and no bias, has registers for its epilogue in one piece.
    """
    if generation(x.device) < 9:
        return _older(x)
    one_piece = plain and generation(x.device) == 9
    pieces = 1 if one_piece else 2
    return Tiling(rows=tile_rows(x), columns=256, flatten=not gathered, pieces=pieces)


def weight_gradient(
    x: Tensor, F: int, D: int, *, gathered: bool = False, adds: bool = False
) -> Tiling:
    """For `dw[e] = dy_e.T @ x_e`, an (F, D) matrix an expert.

    The look-up of a gathered operand's tokens takes two of the stages. A tile that is added to a
    float32 tensor is staged in slices, being twice as large.
    """
    if generation(x.device) < 9:
        return _older(x)
    pieces = 4 if adds else 1
    if gathered:
        return Tiling(rows=128, columns=256, stages=5, pieces=pieces)
    return Tiling(rows=128, columns=256, pieces=pieces)
