"""Row plans: the order in which tokens lie before their experts.

A grouped matmul wants the rows of one expert beside each other. A plan names that order without
moving anything: rows run through the experts, within an expert through the tokens, within a token
through its slots. Shapes: T tokens, K experts a token, E experts, R rows.
"""

from dataclasses import dataclass

from torch import Tensor

from . import reference
from ._checks import check_expert_ids, check_positive


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


def plan_rows(expert_ids_TK: Tensor, num_experts: int, *, align: int = 1) -> RowPlan:
    """Lay the routes out by expert, then token, then slot.

    Args:
        expert_ids_TK: int64 in [-1, E); -1 = no route.
        num_experts: E, at least 1.
        align: each expert's rows are padded to a multiple of this; an expert without routes takes
            no rows.

    Returns:
        The `RowPlan`, on the device of the ids.

    Raises:
        TypeError: the ids are not int64.
        ValueError: a shape or range is not as above. On a GPU an id out of range is a device
            assertion, because checking it here would wait for the device; in a graph of
            `torch.compile` values are not checked here either.

    Note:
        R is the capacity `T * K + E * (align - 1)` whatever the ids are, on every device: how many
        rows are used is known to the device alone, as `offsets_E[-1]`.
    """
    check_positive("num_experts", num_experts)
    check_positive("align", align)
    check_expert_ids(expert_ids_TK, num_experts)
    return RowPlan(*reference.plan_rows(expert_ids_TK, num_experts, align))
