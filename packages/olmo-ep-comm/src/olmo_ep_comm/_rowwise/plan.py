"""Which row each route gets, what is dropped, and what travels once: the one-sided plan.

All ranks know all requested counts and compute the same table of kept ones. Rows of a rank are
ordered by expert, then source rank, then token, then slot, so that sums of that table give the
first row of each (expert, source), and a route finds its row from its place among its rank's routes
to the expert. Nothing else is exchanged, nothing is read by the host, and nothing is atomic. This
is the definition; `_triton.plan_kernels` does the same in four launches, bit for bit.

A token with several rows on one rank is sent there once, into the row of its first slot: its
**head**. The row of each slot names the next one of the same token and rank, in slot order, so that
the receiver copies along this chain, and adds along it on the way back.

Shapes: S source ranks, Q destination ranks, L experts of a rank, T tokens, K slots, C rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from olmo_ep_comm.reference import is_route, sort_routes

from .sizes import Form

Admit = Callable[[Tensor, int], Tensor]
"""`admit(requested_SQL, capacity) -> kept_SQL`: how many routes of each cell are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class SourcePlan:
    """Where the routes of one rank's tokens go. Each is int32 (T, K), and -1 where there is none.

    Attributes:
        rank_TK: Destination rank of each kept route.
        row_TK: Its row there.
        next_TK: The row of the token's next slot on the same rank.
        sum_TK: For a head, the place `token * F + j` of its rank's sum among the sums of the token,
            j counting heads in slot order and F the most there can be.
        num_sums_T: Heads of each token, int32 (T).
        num_dropped: 0-d int64, routes of this rank that found no room.
    """

    rank_TK: Tensor
    row_TK: Tensor
    next_TK: Tensor
    sum_TK: Tensor
    num_sums_T: Tensor
    num_dropped: Tensor


def count_requests(expert_ids_TK: Tensor, num_experts: int) -> Tensor:
    """Return int32 (E): the routes of this rank to each expert."""
    offsets_E = sort_routes(expert_ids_TK, num_experts).offsets_E
    return offsets_E.diff(prepend=offsets_E.new_zeros(1))


def ask_admit(requested_SE: Tensor, form: Form, admit: Admit) -> Tensor:
    """Return int64 (S, Q, L): what the policy keeps, whatever it makes of the requests.

    Raises:
        ValueError: If it returns another shape.
        TypeError: If it returns no tensor of integers.
    """
    shape = (form.num_ranks, form.num_ranks, form.local_experts)
    kept_SQL = admit(requested_SE.view(shape).long(), form.capacity)
    if not isinstance(kept_SQL, Tensor) or kept_SQL.is_floating_point():
        got = kept_SQL.dtype if isinstance(kept_SQL, Tensor) else type(kept_SQL).__name__
        raise TypeError(f"`admit` must return a tensor of integers, got {got}.")
    if tuple(kept_SQL.shape) != shape:
        raise ValueError(
            "`admit` must return one number for each (source rank, destination rank, expert of a "
            f"rank), shape {shape}, got {tuple(kept_SQL.shape)}."
        )
    return kept_SQL.long()


def keep_requests(requested_SE: Tensor, form: Form, admit: Admit | None) -> Tensor:
    """Return int64 (S, Q, L): the kept routes of each source to each expert of each rank.

    Whatever `admit` returns is cut to the requests and, in row order, to the capacity: a wrong
    policy may drop too much, but no row is ever written outside of a buffer.
    """
    requested_SQL = requested_SE.view(form.num_ranks, form.num_ranks, form.local_experts).long()
    kept_SQL = requested_SQL
    if admit is not None:
        admitted_SQL = ask_admit(requested_SE, form, admit)
        kept_SQL = admitted_SQL.clamp(min=0).minimum(requested_SQL)
    running_QC = kept_SQL.permute(1, 2, 0).flatten(1).cumsum(1).clamp(max=form.capacity)
    kept_QC = running_QC.diff(dim=1, prepend=torch.zeros_like(running_QC[:, :1]))
    shape = (form.num_ranks, form.local_experts, form.num_ranks)
    return kept_QC.view(shape).permute(2, 0, 1).contiguous()


def row_ends(kept_SQL: Tensor, rank: int) -> Tensor:
    """Return int32 (L): the inclusive ends of the rows of each expert of `rank`."""
    return kept_SQL[:, rank].sum(0).cumsum(0).int()


def plan_source(expert_ids_TK: Tensor, kept_SQL: Tensor, rank: int, form: Form) -> SourcePlan:
    """Give every route of the tokens of `rank` its row, or none."""
    routes = sort_routes(expert_ids_TK, form.num_experts)
    offsets_E = routes.offsets_E.long()
    requested_E = offsets_E.diff(prepend=offsets_E.new_zeros(1))
    expert_TK = expert_ids_TK.long().clamp(0, form.num_experts - 1)
    place_TK = routes.rows_TK - (offsets_E - requested_E)[expert_TK]
    kept_E = kept_SQL[rank].flatten()
    is_kept_TK = is_route(expert_ids_TK, form.num_experts) & (place_TK < kept_E[expert_TK])

    kept_QLS = kept_SQL.permute(1, 2, 0)
    ends_QLS = kept_QLS.flatten(1).cumsum(1).view_as(kept_QLS)
    first_E = (ends_QLS - kept_QLS)[:, :, rank].flatten()
    row_TK = torch.where(is_kept_TK, first_E[expert_TK] + place_TK, -1)
    rank_TK = torch.where(is_kept_TK, expert_TK // form.local_experts, -1)

    shares_TKK = (rank_TK[:, :, None] == rank_TK[:, None, :]) & is_kept_TK[:, :, None]
    is_head_TK = is_kept_TK & ~shares_TKK.tril(-1).any(2)
    later_TKK = shares_TKK.triu(1)
    next_slot_TK = later_TKK.int().argmax(2)  # the first of the largest
    next_TK = torch.where(later_TKK.any(2), row_TK.gather(1, next_slot_TK), -1)
    first_sum_T1 = torch.arange(len(row_TK), device=row_TK.device)[:, None] * form.sums_a_token
    sum_TK = torch.where(is_head_TK, first_sum_T1 + is_head_TK.cumsum(1) - 1, -1)
    return SourcePlan(
        rank_TK.int(),
        row_TK.int(),
        next_TK.int(),
        sum_TK.int(),
        is_head_TK.sum(1, dtype=torch.int32),
        (requested_E - kept_E).sum(),
    )
