"""A gate as torch operators over the kernels of `_triton.gate`.

The gradients of the weights and of the scores come back as that of the logits, in one kernel. The
logits as they were given, the ids and the weights are what backward keeps; the scores it computes
again.

Shapes: T tokens, K experts a token, E experts.
"""

from typing import Any

import torch
from torch import Tensor

from ._impl import MAX_TOP_K, launching_on, too_many_experts


def why_not(logits_TE: Tensor, top_k: int, num_groups: int, topk_groups: int) -> str | None:
    """Say why the kernels cannot route these logits, or return None when they can."""
    E = logits_TE.shape[1]
    if logits_TE.dtype == torch.float64:
        return "its kernels compute in float32, not in float64"
    if reason := too_many_experts(E):
        return reason
    if top_k > MAX_TOP_K:
        return f"its kernels select up to {MAX_TOP_K} experts a token, got {top_k}"
    if topk_groups < num_groups and (E & (E - 1) or num_groups & (num_groups - 1)):
        return (
            "its kernels limit groups where the experts and the groups are powers of two, "
            f"got {E} and {num_groups}"
        )
    return None


@torch.library.custom_op("olmo_routing::gate", mutates_args=())
def gate(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    mask_T: Tensor | None,
    given_TK: Tensor | None,
    top_k: int,
    sigmoid: bool,
    renormalize: bool,
    route_scale: float,
    num_groups: int,
    topk_groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `expert_ids_TK`, `weights_TK`, `scores_TE`, and the counts, bad tokens last."""
    from ._triton import gate as kernels

    if logits_TE.shape[0] == 0:
        ids_TK, weights_TK, scores_TE, counts = _shapes(logits_TE, top_k)
        return ids_TK, weights_TK, scores_TE, counts.zero_()
    with launching_on(logits_TE):
        return kernels.gate(
            logits_TE.contiguous(),
            None if bias_E is None else bias_E.to(torch.float32).contiguous(),
            None if mask_T is None else mask_T.contiguous(),
            None if given_TK is None else given_TK.contiguous(),
            top_k=top_k,
            sigmoid=sigmoid,
            renormalize=renormalize,
            route_scale=route_scale,
            num_groups=num_groups,
            topk_groups=topk_groups,
        )


@torch.library.custom_op("olmo_routing::gate_backward", mutates_args=())
def gate_backward(
    logits_TE: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    g_weights_TK: Tensor | None,
    g_scores_TE: Tensor | None,
    sigmoid: bool,
    renormalize: bool,
    route_scale: float,
) -> Tensor:
    """Return the gradient of the logits."""
    from ._triton import gate_backward as kernels

    if logits_TE.shape[0] == 0:
        return torch.empty_like(logits_TE)
    with launching_on(logits_TE):
        g_logits_TE = kernels.gate_backward(
            logits_TE.contiguous(),
            ids_TK,
            weights_TK,
            None if g_weights_TK is None else g_weights_TK.contiguous(),
            None if g_scores_TE is None else g_scores_TE.contiguous(),
            sigmoid=sigmoid,
            renormalize=renormalize,
            route_scale=route_scale,
        )
    return g_logits_TE.to(logits_TE.dtype)


def _shapes(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    T, E = logits_TE.shape
    return (
        logits_TE.new_empty(T, top_k, dtype=torch.int64),
        logits_TE.new_empty(T, top_k, dtype=torch.float32),
        logits_TE.new_empty(T, E, dtype=torch.float32),
        logits_TE.new_empty(E + 1, dtype=torch.int32),
    )


@gate.register_fake
def _(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    mask_T: Tensor | None,
    given_TK: Tensor | None,
    top_k: int,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _shapes(logits_TE, top_k)


@gate_backward.register_fake
def _(logits_TE: Tensor, *arguments: Any) -> Tensor:
    return logits_TE.new_empty(logits_TE.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ids_TK, weights_TK, _, counts = output
    ctx.save_for_backward(inputs[0], ids_TK, weights_TK)
    ctx.mark_non_differentiable(ids_TK, counts)
    ctx.set_materialize_grads(False)
    ctx.options = inputs[5:8]


def _differentiate(
    ctx: Any,
    _ids: Tensor | None,
    g_weights_TK: Tensor | None,
    g_scores_TE: Tensor | None,
    _counts: Tensor | None,
) -> tuple[Tensor | None, ...]:
    if g_weights_TK is None and g_scores_TE is None:
        return (None,) * 10
    g_logits_TE = gate_backward(*ctx.saved_tensors, g_weights_TK, g_scores_TE, *ctx.options)
    return (g_logits_TE, *(None,) * 9)


def _refuse_second_order(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    raise RuntimeError(
        "The kernels of `route` must be differentiated once at most, got a gradient of a gradient; "
        "use impl='reference', which goes to any order."
    )


gate.register_autograd(_differentiate, setup_context=_save)
gate_backward.register_autograd(_refuse_second_order)
