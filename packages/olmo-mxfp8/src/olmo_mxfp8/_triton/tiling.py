"""How a product is cut into tiles, for the device it runs on."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

Kind = Literal["plain", "native"]

_SMALL_BLACKWELL = 12
"""The generation with scaled units in reach of every warp, and with 99 KiB of shared memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """One configuration of a product.

    Attributes:
        rows: Height of an output tile.
        columns: Its width.
        inner: Depth of one step of the inner loop.
        warps: Warps a program.
        stages: Steps whose loads are in flight.
        group: Tiles down a column that are computed at one time.
        flatten: Make one loop of tiles and steps, so that loads run during an epilogue; it takes
            tiles of equally many steps.
    """

    rows: int
    columns: int
    inner: int
    warps: int = 8
    stages: int = 3
    group: int = 8
    flatten: bool = False

    @property
    def options(self) -> dict[str, int]:
        """What the kernels take by keyword."""
        return {
            "BM": self.rows,
            "BN": self.columns,
            "BK": self.inner,
            "GROUP": self.group,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def row_product(kind: Kind, out_dtype: torch.dtype, device: torch.device) -> Tiling:
    """For `y = x @ w[e].T`. A float32 tile takes twice the staging memory: it is half as wide."""
    if generation(device) == _SMALL_BLACKWELL:
        return _small()
    if kind == "native":
        return Tiling(rows=128, columns=128, inner=128)
    if generation(device) < 9:
        return _older(device)
    wide = out_dtype.itemsize == 2
    return Tiling(rows=128, columns=256 if wide else 128, inner=64, group=4, flatten=True)


def outer_product(out_dtype: torch.dtype, device: torch.device) -> Tiling:
    """For `dw[e] = dy_e.T @ x_e`, over `inner` rows a step."""
    if generation(device) == _SMALL_BLACKWELL:
        return _small()
    if generation(device) < 9:
        return _older(device)
    wide = out_dtype.itemsize == 2
    return Tiling(rows=128, columns=256 if wide else 128, inner=64)


def _small() -> Tiling:
    # With a float32 result it takes 96 of the 99 KiB that a program may have there.
    return Tiling(rows=128, columns=128, inner=64, stages=2)


def _older(device: torch.device) -> Tiling:
    if generation(device) == 0:
        return Tiling(rows=32, columns=32, inner=32)
    # What is larger spills: before Hopper descriptors are computed in registers.
    return Tiling(rows=64, columns=64, inner=32, warps=4)


@cache
def generation(device: torch.device) -> int:
    """The major compute capability; 0 in the interpreter. Hopper is 9, the first with FP8 units."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


@cache
def num_programs(device: torch.device) -> int:
    """How many programs run at once, one a multiprocessor."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
