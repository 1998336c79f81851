"""Tile plans: which rows a tile of a grouped matmul takes, and whose they are.

A grouped matmul cuts the rows of every expert into tiles of equal height; no tile holds rows of two
experts, and an expert's last tile may be partly empty. How many tiles there are is known to the
device alone, so the list is as long as it could be and its used length lies beside it.

Shapes: E experts, R rows, C = ceil(R / height) + E tiles at most.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import reference
from ._checks import MOST_ROWS, can_read, check_positive, check_tensor
from ._impl import Impl, launching_on, pick, too_many_experts
from ._pytree import tensor_tree


@tensor_tree
@dataclass(frozen=True, slots=True, eq=False)
class TilePlan:
    """The tiles of all experts, in the order of their rows.

    Attributes:
        experts_C: int32, whose rows a tile holds; -1 past the last tile.
        starts_C: int32, the first row of a tile; -1 past the last tile. The tile ends `height` rows
            further or at the expert's offset, whichever comes first.
        num_tiles: int32, 0-d: how many tiles there are.
    """

    experts_C: Tensor
    starts_C: Tensor
    num_tiles: Tensor


def plan_tiles(offsets_E: Tensor, num_rows: int, height: int, *, impl: Impl = "auto") -> TilePlan:
    """Cut every expert's rows into tiles.

    Args:
        offsets_E: int32, the inclusive end of each expert's rows, as in `RowPlan`.
        num_rows: R, the rows that there is room for, at least the last offset.
        height: rows a tile, at least 1; with `num_rows` below 2^31, which int32 can add.
        impl: as in `plan_rows`; "triton" is one kernel, for up to 1024 experts.

    Returns:
        The `TilePlan`, on the device of the offsets. An expert without rows has no tile.

    Raises:
        TypeError: a dtype is not as above.
        ValueError: a shape or range is not as above, or the named `impl` cannot run. The offsets
            themselves are read on the CPU only.
    """
    check_positive("num_rows", num_rows, least=0)
    check_positive("height", height)
    if num_rows + height > MOST_ROWS:
        raise ValueError(
            f"`num_rows` + `height` must be at most 2^31 - 1, got {num_rows} + {height}; "
            "no tile need be higher than the rows."
        )
    check_tensor("offsets_E", offsets_E, "; give a row plan's `offsets_E`")
    if offsets_E.dtype != torch.int32:
        raise TypeError(f"`offsets_E` must be int32, got {offsets_E.dtype}.")
    if offsets_E.ndim != 1 or offsets_E.numel() == 0:
        raise ValueError(
            f"`offsets_E` must hold one end an expert, got shape {tuple(offsets_E.shape)}."
        )
    if can_read(offsets_E):
        ends = [0, *offsets_E.tolist()]
        if ends != sorted(ends) or ends[-1] > num_rows:
            raise ValueError(
                f"`offsets_E` must not decrease, from 0 to at most `num_rows`={num_rows}, "
                f"got {ends[1:]}."
            )
    if pick(impl, offsets_E.device, too_many_experts(offsets_E.numel())):
        return TilePlan(*_plan_tiles(offsets_E, num_rows, height))
    return TilePlan(*reference.plan_tiles(offsets_E, num_rows, height))


@torch.library.custom_op("olmo_routing::plan_tiles", mutates_args=())
def _plan_tiles(offsets_E: Tensor, num_rows: int, height: int) -> tuple[Tensor, Tensor, Tensor]:
    from ._triton import plan

    with launching_on(offsets_E):
        return plan.plan_tiles(offsets_E.contiguous(), num_rows, height)


@_plan_tiles.register_fake
def _(offsets_E: Tensor, num_rows: int, height: int) -> tuple[Tensor, Tensor, Tensor]:
    capacity = -(-num_rows // height) + offsets_E.numel()
    return (
        offsets_E.new_empty(capacity),
        offsets_E.new_empty(capacity),
        offsets_E.new_empty(()),
    )
