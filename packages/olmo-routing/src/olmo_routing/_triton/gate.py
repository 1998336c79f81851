# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""A gate in one pass over the logits.

What is computed is defined in `reference.py`. A program holds a few tokens with all of their
experts. An expert is selected K times over: the largest merit, among equals the largest logit,
among those the lowest id. Merits and logits are compared as integers that keep their order, so that
NaN has a place (behind every number) and -0 is 0.

Shapes: T tokens, K experts a token, E experts; EP and KP are the next powers of two.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 1024
"""Tokens times experts that a program holds, 8 a thread: twice as many spill registers."""
_TOKENS = 128
"""Tokens a program at most: of few experts, more spill registers too."""
WARPS = 4
REGISTERS = 128
"""A thread, enough for all; left to itself, ptxas spills some to reach a higher occupancy."""
_AT_ONCE = 16
"""Programs a multiprocessor; each adds up its counts first, so that few meet in one counter."""
_LAST = tl.constexpr(-(2**31))
"""Behind every number that `_ordered` gives."""


def gate(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    mask_T: Tensor | None,
    given_TK: Tensor | None,
    *,
    top_k: int,
    sigmoid: bool,
    renormalize: bool,
    route_scale: float,
    num_groups: int,
    topk_groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Route every token.

    Args:
        logits_TE: Packed; float32, bfloat16 or float16.
        bias_E: Packed float32, or None.
        mask_T: Packed bool, or None.
        given_TK: int64 ids to weigh instead of selecting, or None.
        top_k: As in `route`; so are the next four.
        sigmoid: Whether the gate is a sigmoid, else a softmax.
        renormalize: See `route`.
        route_scale: See `route`.
        num_groups: See `route`.
        topk_groups: See `route`.

    Returns:
        `expert_ids_TK` int64, `weights_TK` and `scores_TE` float32; and (E + 1,) int32: the routes
        of each expert, then the number of tokens with a NaN or +inf logit.
    """
    T, E = logits_TE.shape
    EP, KP = max(2, triton.next_power_of_2(E)), max(2, triton.next_power_of_2(top_k))
    tokens = tokens_at_once(EP)
    blocks = triton.cdiv(T, tokens)
    ids_TK = torch.empty(T, top_k, dtype=torch.int64, device=logits_TE.device)
    weights_TK = torch.empty(T, top_k, dtype=torch.float32, device=logits_TE.device)
    scores_TE = torch.empty(T, E, dtype=torch.float32, device=logits_TE.device)
    # Every program adds its counts: a sum of integers does not depend on their order.
    counts = torch.zeros(E + 1, dtype=torch.int32, device=logits_TE.device)
    _gate_kernel[(min(blocks, _AT_ONCE * multiprocessors(logits_TE.device)),)](
        logits_TE,
        bias_E,
        mask_T,
        given_TK,
        ids_TK,
        weights_TK,
        scores_TE,
        counts,
        route_scale,
        T,
        E,
        K=top_k,
        SIGMOID=sigmoid,
        RENORMALIZE=renormalize,
        GROUPS=num_groups,
        TOP_GROUPS=topk_groups,
        BIASED=bias_E is not None,
        MASKED=mask_T is not None,
        GIVEN=given_TK is not None,
        TOKENS=tokens,
        EP=EP,
        KP=KP,
        BITS=EP.bit_length() - 1,
        SLOTS=64 // (EP.bit_length() - 1),
        num_warps=WARPS,
        maxnreg=REGISTERS,
        # It keeps in the assertion that the given ids are in range.
        debug=given_TK is not None,
        sanitize_overflow=False,
    )
    return ids_TK, weights_TK, scores_TE, counts


def tokens_at_once(EP: int) -> int:
    """How many tokens a program holds, with all of their EP experts."""
    return max(1, min(_TOKENS, _ELEMENTS // EP))


@cache
def multiprocessors(device: torch.device) -> int:
    """How many there are; 2 in the interpreter, whose programs then take several steps."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _ordered(x):
    """An integer that orders as `x` does, -0 as 0 and NaN behind -inf."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, order, -2147483647)


@triton.jit
def _softmax(x):
    """The softmax of rows without NaN: +inf share all the mass, and a row of -inf is all 0."""
    largest = tl.max(x, 1)
    infinite = (largest == float("inf"))[:, None]
    finite = tl.where(largest == float("-inf"), 0.0, largest)[:, None]
    shifted = tl.where(x == float("-inf"), float("-inf"), x - finite)
    part = tl.exp(tl.where(infinite, float("-inf"), shifted))
    part = tl.where(infinite, tl.where(x == float("inf"), 1.0, 0.0), part)
    total = tl.sum(part, 1)[:, None]
    return part * (1.0 / tl.where(total > 0, total, 1.0))


@triton.jit
def _log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _allowed(merit, expert, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, EP: tl.constexpr):
    """Whether an expert's group is among the best; EP is the number of experts here."""
    TOKENS: tl.constexpr = merit.shape[0]
    SIZE: tl.constexpr = EP // GROUPS
    grouped = tl.reshape(tl.where(merit == merit, merit, float("-inf")), (TOKENS, GROUPS, SIZE))
    best = tl.max(grouped, 2)
    if SIZE > 1:
        place = tl.arange(0, SIZE)[None, None, :]
        at = tl.min(tl.where(grouped == best[:, :, None], place, SIZE), 2)
        best += tl.max(tl.where(place == at[:, :, None], float("-inf"), grouped), 2)
    group = tl.arange(0, GROUPS)[None, :]
    order = _ordered(best)
    taken = tl.zeros((TOKENS, GROUPS), tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        left = tl.where(taken > 0, -2147483648, order)
        first = tl.min(tl.where(left == tl.max(left, 1)[:, None], group, GROUPS), 1)
        taken = tl.where(group == first[:, None], 1, taken)
    spread = tl.broadcast_to(taken[:, :, None], (TOKENS, GROUPS, SIZE))
    return tl.reshape(spread, (TOKENS, EP)) > 0


@triton.jit
def _gate_kernel(
    logits,
    bias,
    mask,
    given,
    ids,
    weights,
    scores,
    counts,
    route_scale,
    T,
    E,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BIASED: tl.constexpr,
    MASKED: tl.constexpr,
    GIVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    EP: tl.constexpr,
    KP: tl.constexpr,
    BITS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """`TOKENS` tokens a step; a program adds up the counts of its steps before it gives them."""
    expert = tl.arange(0, EP)[None, :]
    slot = tl.arange(0, KP)[None, :]
    hits = tl.zeros((TOKENS, EP), tl.int32)
    num_bad = tl.zeros((TOKENS,), tl.int32)
    for first in range(tl.program_id(0) * TOKENS, T, tl.num_programs(0) * TOKENS):
        token = (first + tl.arange(0, TOKENS)).to(tl.int64)
        here = token < T
        inside = here[:, None] & (expert < E)
        at = token[:, None] * E + expert
        x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
        real = here
        if MASKED:
            real = here & (tl.load(mask + token, mask=here, other=0) != 0)
        bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 1) > 0
        num_bad += (bad & real).to(tl.int32)
        score = scores_of(x, SIGMOID)
        tl.store(scores + at, score, mask=inside)

        at_slot = token[:, None] * K + slot
        write = here[:, None] & (slot < K)
        if GIVEN:
            id_of = tl.load(given + at_slot, mask=write & real[:, None], other=-1)
            tl.device_assert((id_of >= -1) & (id_of < E), "`expert_ids_TK` must be in [-1, E)")
            tl.store(ids + at_slot, id_of, mask=write)
            for k in range(K):
                id_k = tl.load(given + token * K + k, mask=real, other=-1).to(tl.int32)
                hits += (expert == id_k[:, None]).to(tl.int32)
        else:
            order = _ordered(x)
            rank = order
            allowed = inside
            if BIASED:
                merit = score + tl.load(bias + expert, mask=expert < E, other=0.0)
                merit = tl.where(x == x, merit, float("nan"))
                rank = _ordered(merit)
            if TOP_GROUPS < GROUPS:
                if BIASED:
                    allowed = _allowed(merit, expert, GROUPS, TOP_GROUPS, EP)
                else:
                    ranked = tl.where(x == x, score, float("nan"))
                    allowed = _allowed(ranked, expert, GROUPS, TOP_GROUPS, EP)
            rank = tl.where(allowed, rank, _LAST)
            for chunk in tl.static_range(0, K, SLOTS):
                # The ids of a token side by side in one integer: to write each of them as it is
                # found would move them to other threads one at a time.
                packed = tl.zeros((TOKENS,), tl.int64)
                for k in range(min(K - chunk, SLOTS)):
                    tied = rank == tl.max(rank, 1)[:, None]
                    if BIASED:
                        second = tl.where(tied, order, _LAST)
                        tied = tied & (second == tl.max(second, 1)[:, None])
                    best = tl.min(tl.where(tied, expert, EP - 1), 1)
                    packed += best.to(tl.int64) << (BITS * k)
                    rank = tl.where(expert == best[:, None], _LAST, rank)
                place = slot - chunk
                id_of = (packed[:, None] >> tl.where(place < 0, 0, BITS * place)) & (EP - 1)
                id_of = tl.where(real[:, None], id_of, -1)
                tl.store(ids + at_slot, id_of, mask=write & (place >= 0) & (place < SLOTS))
            hits += (allowed & real[:, None] & (rank == _LAST)).to(tl.int32)
            if K > SLOTS:
                # Other threads have written these.
                tl.debug_barrier()
                id_of = tl.load(ids + at_slot, mask=write, other=-1)
            id_of = tl.where(write, id_of, -1)

        at_chosen = token[:, None] * E + id_of
        if RENORMALIZE or SIGMOID:
            value = tl.load(logits + at_chosen, mask=id_of >= 0, other=float("-inf"))
            value = value.to(tl.float32)
        if RENORMALIZE:
            value = tl.where(value == value, value, float("-inf"))
            if SIGMOID:
                value = tl.where(id_of >= 0, _log_sigmoid(value), float("-inf"))
            weight = _softmax(value)
        elif SIGMOID:
            weight = scores_of(value, SIGMOID)
        else:
            # Other threads have written these.
            tl.debug_barrier()
            weight = tl.load(scores + at_chosen, mask=id_of >= 0, other=0.0)
        tl.store(weights + at_slot, route_scale * weight, mask=write)

    lane = tl.arange(0, EP)
    count = tl.sum(hits, 0)
    tl.atomic_add(counts + lane, count, mask=(lane < E) & (count > 0), sem="relaxed")
    all_bad = tl.sum(num_bad, 0)
    tl.atomic_add(counts + E, all_bad, mask=all_bad > 0, sem="relaxed")


@triton.jit
def scores_of(x, SIGMOID: tl.constexpr):
    """The scores of logits; that of NaN is 0."""
    clean = tl.where(x == x, x, float("-inf"))
    if SIGMOID:
        return tl.where(clean == float("-inf"), 0.0, 1.0 / (1.0 + tl.exp(-clean)))
    else:
        return _softmax(clean)
