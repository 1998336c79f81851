"""What is written where, in plain torch: the readable form of the kernels in `_triton.moves`.

Each function acts for one rank. `peers` are the buffers of all ranks of the group; what a function
puts there is seen after the next barrier, and what it gets from there was written before the last.
Rows are rows of int32 words, and mean what they mean to the caller.

The words of a row of `meta_C4` are: the next row of the same token here or -1, the global route
`(source * M + token) * K + slot`, for a head the place of the sum at its source or -1 for others,
and the bits of the weight.

Shapes: T tokens, M of them at most, K slots, E experts, L of them on a rank, R ranks, C rows of
which the first `num_rows` (a 0-d tensor) are defined, W words, D values.
"""

import torch
from torch import Tensor

from olmo_ep_comm._checks import unknown_ids

from .memory import Shared, Stack
from .plan import Admit, SourcePlan, count_requests, keep_requests, plan_source, row_ends
from .sizes import META_WORDS, Form


def put_requests(peers: Shared, rank: int, expert_ids_TK: Tensor, lease: int, form: Form) -> Tensor:
    """Write the routes to each expert, the number of unknown ids and a lease to every rank.

    Returns:
        What `put_plan` wants to have back.
    """
    counts_E = count_requests(expert_ids_TK, form.num_experts)
    num_unknown = unknown_ids(expert_ids_TK, form.num_experts).sum(dtype=torch.int32)
    row_W = torch.cat([counts_E, num_unknown[None], counts_E.new_full((1,), lease)])
    for buffer in peers.every:
        buffer[rank].copy_(row_W)
    return expert_ids_TK


def put_plan(
    peers: Shared,
    rank: int,
    requests: Tensor,
    weights_TK: Tensor,
    counts_RW: Tensor,
    admit: Admit | None,
    form: Form,
) -> tuple[SourcePlan, Tensor, Tensor]:
    """Plan the routes of this rank and write what each row is to its rank.

    Returns:
        The plan; the ends of the rows of this rank's experts, int32 (L); and whether no rank found
        a fault, 0-d.
    """
    kept_SQL = keep_requests(counts_RW[:, : form.num_experts], form, admit)
    plan = plan_source(requests, kept_SQL, rank, form)
    put_meta(peers, rank, weights_TK, plan, form)
    return plan, row_ends(kept_SQL, rank), (counts_RW[:, form.fault_column] == 0).all()


def put_rows(peers: Stack, leases_R: Tensor, words_TW: Tensor, plan: SourcePlan) -> None:
    """Write each token once into every rank it goes to: into its head.

    `peers` are the receive buffers; rank q has asked for the one with the index `leases_R[q]`.
    """
    for rank, lease in enumerate(leases_R.tolist()):
        is_head_TK = (plan.sum_TK >= 0) & (plan.rank_TK == rank)
        token_H = is_head_TK.nonzero()[:, 0]
        peers.buffers[lease].every[rank].index_copy_(
            0, plan.row_TK[is_head_TK].long(), words_TW[token_H]
        )


def put_meta(peers: Shared, rank: int, weights_TK: Tensor, plan: SourcePlan, form: Form) -> None:
    """Write what each row is: next row of its token, route, place of its sum, and weight."""
    num_tokens = len(weights_TK)
    route_TK = torch.arange(num_tokens * form.top_k, device=weights_TK.device, dtype=torch.int32)
    route_TK = (route_TK + rank * form.max_tokens * form.top_k).view_as(plan.row_TK)
    bits_TK = weights_TK.contiguous().view(torch.int32)
    meta_TK4 = torch.stack([plan.next_TK, route_TK, plan.sum_TK, bits_TK], 2)
    for destination, buffer in enumerate(peers.every):
        goes_TK = plan.rank_TK == destination
        buffer.index_copy_(0, plan.row_TK[goes_TK].long(), meta_TK4[goes_TK])


def take_meta(meta_C4: Tensor, num_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return what each row is, and its weight (C), in memory that the next dispatch leaves alone.

    Rows past the first `num_rows` are undefined.
    """
    meta_C4 = meta_C4.clone()
    return meta_C4, meta_C4[:, META_WORDS - 1].contiguous().view(torch.float32)


def fan_out(words_CW: Tensor, out_CW: Tensor, meta_C4: Tensor, num_rows: Tensor) -> None:
    """Copy each head to the rows of its chain; `out_CW` may be `words_CW` itself."""
    head = _heads(meta_C4, num_rows)
    row = head
    while row.numel():
        out_CW[row] = words_CW[head]
        row = meta_C4[row, 0].long()
        head, row = head[row >= 0], row[row >= 0]


def put_sums(peers: Shared, y_CD: Tensor, meta_C4: Tensor, num_rows: Tensor, form: Form) -> None:
    """Add the rows of each chain, in float32 and slot order, and write the sum to its token's rank.

    The sum is rounded to the dtype of the rows.
    """
    head, sum_HD = _sum_chains(y_CD, meta_C4, num_rows)
    source_H = meta_C4[head, 1] // (form.max_tokens * form.top_k)
    for source, buffer in enumerate(peers.every):
        mine = source_H == source
        buffer.index_copy_(0, meta_C4[head[mine], 2].long(), sum_HD[mine])


def keep_sums(sums_CD: Tensor, y_CD: Tensor, meta_C4: Tensor, num_rows: Tensor) -> None:
    """Add the rows of each chain as `put_sums` does and keep the sum here, at the head."""
    sums_CD.index_copy_(0, *_sum_chains(y_CD, meta_C4, num_rows))


def put_weights(
    peers: Shared, values_C: Tensor, meta_C4: Tensor, num_rows: Tensor, form: Form
) -> None:
    """Write the value of each row to the slot that it came from."""
    route_R = meta_C4[: int(num_rows), 1].long()
    slots = form.max_tokens * form.top_k
    for source, buffer in enumerate(peers.every):
        mine = route_R // slots == source
        buffer.index_copy_(0, route_R[mine] % slots, values_C[: len(route_R)][mine])


def add_sums(sums_ND: Tensor, num_sums_T: Tensor, form: Form) -> Tensor:
    """Return (T, D): the sums of each token added in float32, in the order of its slots."""
    sums_TFD = sums_ND.view(form.max_tokens, form.sums_a_token, form.width)[: len(num_sums_T)]
    sum_dtype = torch.promote_types(sums_ND.dtype, torch.float32)
    y_TD = torch.zeros(len(num_sums_T), form.width, dtype=sum_dtype, device=sums_ND.device)
    for place in range(form.sums_a_token):
        y_TD += sums_TFD[:, place].masked_fill((num_sums_T <= place)[:, None], 0).to(sum_dtype)
    return y_TD.to(sums_ND.dtype)


def get_sums(peers: Shared, plan: SourcePlan, form: Form) -> Tensor:
    """Return (T, D): the sums of each token, fetched from where `keep_sums` kept them.

    They are added as `add_sums` adds them.
    """
    dtype = peers.own[0].dtype
    sum_dtype = torch.promote_types(dtype, torch.float32)
    y_TD = torch.zeros(len(plan.row_TK), form.width, dtype=sum_dtype, device=plan.row_TK.device)
    for slot in range(form.top_k):
        is_head_T = plan.sum_TK[:, slot] >= 0
        for rank, buffer in enumerate(peers.every):
            token_H = (is_head_T & (plan.rank_TK[:, slot] == rank)).nonzero().flatten()
            y_TD[token_H] += buffer[plan.row_TK[token_H, slot].long()].to(sum_dtype)
    return y_TD.to(dtype)


def _sum_chains(y_CD: Tensor, meta_C4: Tensor, num_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the heads (H) and the sums of their chains (H, D), added in float32 and rounded."""
    head = _heads(meta_C4, num_rows)
    sum_dtype = torch.promote_types(y_CD.dtype, torch.float32)
    sum_HD = y_CD[head].to(sum_dtype)
    row = meta_C4[head, 0].long()
    while (row >= 0).any():
        sum_HD[row >= 0] += y_CD[row[row >= 0]].to(sum_dtype)
        row = torch.where(row >= 0, meta_C4[row.clamp(min=0), 0].long(), -1)
    return head, sum_HD.to(y_CD.dtype)


def _heads(meta_C4: Tensor, num_rows: Tensor) -> Tensor:
    """Return the rows that are the first of their chain."""
    return (meta_C4[: int(num_rows), 2] >= 0).nonzero().flatten()
