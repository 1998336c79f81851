"""What is written where, in plain torch: the readable form of the kernels in `_triton.moves`.

Each function acts for one rank. `peers` are the buffers of all ranks of the group; what a function
writes there is seen after the next barrier. Rows are rows of int32 words, and mean what they mean
to the caller.

The words of a row of `meta_C4` are: the next row of the same token here or -1, the global route
`(source * M + token) * K + slot`, for a head the place of the sum at its source or -1 for others,
and the bits of the weight.

Shapes: T tokens, M of them at most, K slots, C rows of which the first `num_rows` (a 0-d tensor)
are defined, W words, D values.
"""

import torch
from torch import Tensor

from .form import Form
from .memory import Shared
from .plan import SourcePlan


def put_counts(peers: Shared, rank: int, counts_E: Tensor, lease: int) -> None:
    """Write this rank's requests, and the receive buffer it has free, to every rank."""
    row = torch.cat([counts_E, counts_E.new_full((1,), lease)])
    for buffer in peers.every:
        buffer[rank].copy_(row)


def put_rows(peers: list[Shared], leases_R: Tensor, words_TW: Tensor, plan: SourcePlan) -> None:
    """Write each token once into every rank it goes to: into its head.

    `peers` are the receive buffers; rank q has asked for the one with the index `leases_R[q]`.
    """
    for rank, lease in enumerate(leases_R.tolist()):
        is_head_TK = (plan.sum_TK >= 0) & (plan.rank_TK == rank)
        token_H = is_head_TK.nonzero()[:, 0]
        peers[lease].every[rank].index_copy_(0, plan.row_TK[is_head_TK].long(), words_TW[token_H])


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
    head = _heads(meta_C4, num_rows)
    source_H = meta_C4[head, 1] // (form.max_tokens * form.top_k)
    sum_dtype = torch.promote_types(y_CD.dtype, torch.float32)
    sum_HD = y_CD[head].to(sum_dtype)
    row = meta_C4[head, 0].long()
    while (row >= 0).any():
        sum_HD[row >= 0] += y_CD[row[row >= 0]].to(sum_dtype)
        row = torch.where(row >= 0, meta_C4[row.clamp(min=0), 0].long(), -1)
    for source, buffer in enumerate(peers.every):
        mine = source_H == source
        buffer.index_copy_(0, meta_C4[head[mine], 2].long(), sum_HD[mine].to(buffer.dtype))


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


def _heads(meta_C4: Tensor, num_rows: Tensor) -> Tensor:
    """Return the rows that are the first of their chain."""
    return (meta_C4[: int(num_rows), 2] >= 0).nonzero().flatten()
