"""Row plans: the order in which tokens lie before their experts.

A grouped matmul wants the rows of one expert beside each other. A plan names that order without
moving anything: rows run through the experts, within an expert through the tokens, within a token
through its slots. Shapes: T tokens, K experts a token, E experts, R rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import reference
from ._checks import MOST_ROWS, check_expert_ids, check_positive
from ._impl import Impl, launching_on, pick, too_many_experts
from ._pytree import tensor_tree


@tensor_tree
@dataclass(frozen=True, slots=True, eq=False)
class RowPlan:
    """Which row each route takes, and which route lies in each row.

    Attributes:
        offsets_E: int32, the inclusive end of each expert's rows, padding included: what torch's
            `grouped_mm` takes as `offs`.
        rows_TK: int64, the row of each route; -1 where there is no route.
        routes_R: int64, the route of each row as the flat index `t * K + k`; -1 in padding and in
            all rows past `offsets_E[-1]`.
    """

    offsets_E: Tensor
    rows_TK: Tensor
    routes_R: Tensor


def plan_rows(
    expert_ids_TK: Tensor, num_experts: int, *, align: int = 1, impl: Impl = "auto"
) -> RowPlan:
    """Lay the routes out by expert, then token, then slot.

    Args:
        expert_ids_TK: int64 in [-1, E); -1 = no route.
        num_experts: E, at least 1.
        align: each expert's rows are padded to a multiple of this; an expert without routes takes
            no rows.
        impl: "reference" is plain torch. "triton" is two kernels: CUDA of compute capability 8.0 or
            newer, up to 1024 experts. "auto" is "triton" on CUDA where it can run
            and "reference" everywhere else.

    Returns:
        The `RowPlan`, on the device of the ids.

    Raises:
        TypeError: the ids are not an int64 tensor.
        ValueError: a shape or range is not as above, there would be room for 2^31 rows or more, or
            the named `impl` cannot run. On a GPU an id
            out of range is a device assertion, because checking it here would wait for the device;
            in a graph of `torch.compile` values are not checked here either.

    Note:
        R is the capacity `T * K + E * (align - 1)` whatever the ids are, on every device: how many
        rows are used is known to the device alone, as `offsets_E[-1]`.
    """
    check_positive("num_experts", num_experts)
    check_positive("align", align)
    check_expert_ids(expert_ids_TK, num_experts)
    capacity = expert_ids_TK.numel() + num_experts * (align - 1)
    if capacity > MOST_ROWS:
        raise ValueError(
            f"The rows must be at most 2^31 - 1, whose ends are int32, got room for {capacity}; "
            "give fewer tokens or a smaller `align`."
        )
    if pick(impl, expert_ids_TK.device, too_many_experts(num_experts)):
        return RowPlan(*_plan_rows(expert_ids_TK, num_experts, align))
    return RowPlan(*reference.plan_rows(expert_ids_TK, num_experts, align))


@torch.library.custom_op("olmo_routing::plan_rows", mutates_args=())
def _plan_rows(
    expert_ids_TK: Tensor, num_experts: int, align: int
) -> tuple[Tensor, Tensor, Tensor]:
    from ._triton import plan

    with launching_on(expert_ids_TK):
        return plan.plan_rows(expert_ids_TK, num_experts, align)


@_plan_rows.register_fake
def _(expert_ids_TK: Tensor, num_experts: int, align: int) -> tuple[Tensor, Tensor, Tensor]:
    capacity = expert_ids_TK.numel() + num_experts * (align - 1)
    return (
        expert_ids_TK.new_empty(num_experts, dtype=torch.int32),
        torch.empty_like(expert_ids_TK),
        expert_ids_TK.new_empty(capacity),
    )
