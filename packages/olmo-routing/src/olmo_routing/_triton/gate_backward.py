# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""The gradient of a gate's logits, from those of its weights and of its scores, in one pass.

The scores are computed again rather than kept.

Shapes: T tokens, K experts a token, E experts; EP and KP are the next powers of two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gate import REGISTERS, WARPS, scores_of, tokens_at_once


def gate_backward(
    logits_TE: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    g_weights_TK: Tensor | None,
    g_scores_TE: Tensor | None,
    *,
    sigmoid: bool,
    renormalize: bool,
    route_scale: float,
) -> Tensor:
    """Return the float32 gradient of the logits from those of the weights and scores, packed."""
    T, E = logits_TE.shape
    K = ids_TK.shape[1]
    EP, KP = max(2, triton.next_power_of_2(E)), max(2, triton.next_power_of_2(K))
    tokens = tokens_at_once(EP)
    g_logits_TE = torch.empty(T, E, dtype=torch.float32, device=logits_TE.device)
    _gate_backward_kernel[(triton.cdiv(T, tokens),)](
        logits_TE,
        ids_TK,
        weights_TK,
        g_weights_TK,
        g_scores_TE,
        g_logits_TE,
        route_scale,
        T,
        E,
        K=K,
        SIGMOID=sigmoid,
        RENORMALIZE=renormalize,
        WEIGHTED=g_weights_TK is not None,
        SCORED=g_scores_TE is not None,
        TOKENS=tokens,
        EP=EP,
        KP=KP,
        num_warps=WARPS,
        maxnreg=REGISTERS,
    )
    return g_logits_TE


@triton.jit
def _gate_backward_kernel(
    logits,
    ids,
    weights,
    g_weights,
    g_scores,
    g_logits,
    route_scale,
    T,
    E,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCORED: tl.constexpr,
    TOKENS: tl.constexpr,
    EP: tl.constexpr,
    KP: tl.constexpr,
):
    """`TOKENS` tokens a program; a softmax over infinities is constant, so its gradient is 0.

    Where the gradient comes by a softmax over the selected logits alone, nobody else is read.
    """
    OF_SCORES: tl.constexpr = SCORED or SIGMOID or not RENORMALIZE
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EP)[None, :]
    slot = tl.arange(0, KP)[None, :]
    here = token < T
    inside = here[:, None] & (expert < E)
    at = token[:, None] * E + expert
    if OF_SCORES:
        x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
        score = scores_of(x, SIGMOID)
    through = tl.zeros((TOKENS, EP), tl.float32)
    if SCORED:
        through = tl.load(g_scores + at, mask=inside, other=0.0)
    direct = tl.zeros((TOKENS, EP), tl.float32)
    if WEIGHTED:
        at_slot = token[:, None] * K + slot
        used = here[:, None] & (slot < K)
        id_of = tl.load(ids + at_slot, mask=used, other=-1)
        g = tl.load(g_weights + at_slot, mask=used & (id_of >= 0), other=0.0)
        if RENORMALIZE:
            weight = tl.load(weights + at_slot, mask=used, other=0.0)
            # Divided exactly: the share of a token's only expert is 1, and its gradient 0.
            share = tl.div_rn(weight, route_scale + tl.zeros_like(weight))
            g = weight * (g - tl.sum(g * share, 1)[:, None])
            if not SIGMOID:
                at_chosen = token[:, None] * E + id_of
                value = tl.load(logits + at_chosen, mask=id_of >= 0, other=0.0).to(tl.float32)
                infinite = tl.max((value == float("inf")).to(tl.int32), 1)[:, None] > 0
                g = tl.where(infinite, 0.0, g)
        else:
            g = route_scale * g
        placed = tl.zeros((TOKENS, EP), tl.float32)
        for k in range(K):
            id_k = tl.sum(tl.where(slot == k, id_of, 0).to(tl.int32), 1)[:, None]
            g_k = tl.sum(tl.where(slot == k, g, 0.0), 1)[:, None]
            placed += tl.where(expert == id_k, g_k, 0.0)
        if not RENORMALIZE:
            through += placed
        elif SIGMOID:
            direct = placed * (1.0 - score)
        else:
            direct = placed
    g_x = direct
    if OF_SCORES:
        if SIGMOID:
            g_x += through * score * (1.0 - score)
        else:
            mean = tl.sum(score * through, 1)[:, None]
            flat = tl.sum((x == float("inf")).to(tl.int32), 1)[:, None] > 0
            g_x += tl.where(flat, 0.0, score * (through - mean))
    tl.store(g_logits + at, g_x, mask=inside)
