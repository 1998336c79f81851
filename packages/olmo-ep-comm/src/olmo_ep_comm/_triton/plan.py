# pyright: reportArgumentType=false, reportCallIssue=false
"""Requests and plan as kernel launches: `put_requests` and `put_plan` of the moves.

Two launches before the barrier that the counts need, and two after it.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from olmo_ep_comm._rowwise.memory import Shared
from olmo_ep_comm._rowwise.plan import Admit, SourcePlan, ask_admit
from olmo_ep_comm._rowwise.sizes import Form

from . import plan_kernels as kernels

_ROUTES = 256
"""Most slots of a block of tokens, if one token does not have more."""
_BLOCKS = 1024
_CHUNK = 32


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """What `put_requests` leaves for `put_plan`.

    Attributes:
        ids_TK: The routes, contiguous.
        blocks_EB: int32 (E + 1, blocks), the routes to each expert in the blocks before.
    """

    ids_TK: Tensor
    blocks_EB: Tensor


def put_requests(
    peers: Shared, rank: int, expert_ids_TK: Tensor, lease: int, form: Form
) -> Requests:
    """Count the routes to each expert and write the counts to every rank, as the moves say."""
    ids_TK = expert_ids_TK.contiguous()
    tokens, slots = _tile(form)
    num_blocks = triton.cdiv(len(ids_TK), tokens)
    E = form.num_experts
    blocks_EB = torch.empty(E + 1, num_blocks, dtype=torch.int32, device=ids_TK.device)
    with torch.cuda.device_of(ids_TK):
        if num_blocks:
            kernels.count_kernel[(num_blocks,)](
                ids_TK,
                blocks_EB,
                ids_TK.numel(),
                num_blocks,
                E=E,
                ROUTES=tokens * form.top_k,
                LANES=tokens * slots,
                BINS=triton.next_power_of_2(E + 2),
            )
        kernels.put_counts_kernel[(E + 1,)](
            blocks_EB,
            peers.pointers,
            num_blocks,
            rank,
            lease,
            E=E,
            NUM_RANKS=form.num_ranks,
            RANKS=triton.next_power_of_2(form.num_ranks),
            BLOCKS=_BLOCKS,
        )
    return Requests(ids_TK, blocks_EB)


def put_plan(
    peers: Shared,
    rank: int,
    requests: Requests,
    weights_TK: Tensor,
    counts_RW: Tensor,
    admit: Admit | None,
    form: Form,
) -> tuple[SourcePlan, Tensor, Tensor]:
    """Plan the routes of this rank and write what each row is to its rank, as the moves say."""
    ids_TK, device = requests.ids_TK, counts_RW.device
    E, num_tokens = form.num_experts, len(ids_TK)
    tokens, slots = _tile(form)
    lanes, ranks = triton.next_power_of_2(E), triton.next_power_of_2(form.num_ranks)

    def words(*shape: int) -> Tensor:
        # Of its own: where a part of a larger tensor starts depends on T, and alignment is what
        # Triton compiles for.
        return torch.empty(shape, dtype=torch.int32, device=device)

    first_E, kept_E, ends_L = words(E), words(E), words(form.local_experts)
    is_sound = torch.empty((), dtype=torch.bool, device=device)
    plan = SourcePlan(
        *(words(num_tokens, form.top_k) for _ in range(4)),
        num_sums_T=words(num_tokens),
        num_dropped=torch.empty((), dtype=torch.int64, device=device),
    )
    admitted_SQL = None
    if admit is not None:
        admitted_SQL = ask_admit(counts_RW[:, :E], form, admit).contiguous()
    with torch.cuda.device_of(counts_RW):
        kernels.place_experts_kernel[(form.num_ranks,)](
            counts_RW,
            counts_RW if admitted_SQL is None else admitted_SQL,
            *(first_E, kept_E, ends_L, is_sound.view(torch.uint8)),
            rank,
            form.capacity,
            E=E,
            NUM_RANKS=form.num_ranks,
            RANKS=ranks,
            LANES=lanes,
            IS_LIMITED=admit is not None,
        )
        kernels.put_plan_kernel[(max(1, triton.cdiv(num_tokens, tokens)),)](
            peers.pointers,
            ids_TK,
            weights_TK.contiguous().view(torch.int32),
            *(counts_RW, requests.blocks_EB, first_E, kept_E),
            *(plan.rank_TK, plan.row_TK, plan.next_TK, plan.sum_TK),
            *(plan.num_sums_T, plan.num_dropped),
            num_tokens,
            requests.blocks_EB.shape[1],
            rank,
            rank * form.max_tokens * form.top_k,
            E=E,
            SHARE=form.local_experts,
            SUMS=form.sums_a_token,
            K=form.top_k,
            SLOTS=slots,
            TOKENS=tokens,
            CHUNK=_CHUNK,
            LANES=lanes,
            num_warps=8,
        )
    return plan, ends_L, is_sound


def _tile(form: Form) -> tuple[int, int]:
    """Return tokens of a block and slots of a token, both powers of two."""
    slots = 1 << (form.top_k - 1).bit_length()
    return max(1, _ROUTES // slots), slots
