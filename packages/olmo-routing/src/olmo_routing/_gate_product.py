"""The product of a gate, in float32, without a float32 copy of the tokens kept for backward.

A router reads tokens of the model's precision, 2 bytes an element, and multiplies them in float32.
Autograd would keep that float32 copy, 4 T D bytes a layer, until the gradient of the weight is
computed. Here backward keeps the tokens as they came, which the layer holds anyway, and converts
them again: the conversion is exact, so that the gradient is bit for bit the same.

A NaN or infinity in a token makes all of its logits NaN or infinite, and the gradient of the weight
would multiply it by gradients of 0: 0 * NaN is NaN, for every token at once. A token without any
finite logit therefore takes no part in the backward, as if it were padding.

Shapes: T tokens, E experts, D model width.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ._transforms import under_transform


def gate_product(x_TD: Tensor, weight_ED: Tensor, mask_T: Tensor | None) -> Tensor:
    """Return `logits_TE = x @ weight.T`, at least float32, whatever autocast says.

    Args:
        x_TD: any floating dtype.
        weight_ED: any floating dtype.
        mask_T: bool; rows where it is False count as zeros, whatever they hold, and get gradients
            of zero.

    Returns:
        float32, or float64 when one of the factors is. Backward keeps the three arguments
        themselves and the logits. Rows without any finite logit get and give gradients of zero. In
        forward mode and under `torch.func`, which know no operator of ours, plain torch computes
        and keeps its own copies.
    """
    if under_transform():
        return _plain_product(x_TD, weight_ED, mask_T)
    return _gate_product(x_TD, weight_ED, mask_T)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Switch autocast off, which the meta device does not know."""
    if device_type == "meta":
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


# An op rather than an autograd.Function: torch.compile takes it as one node, without a warning.
@torch.library.custom_op("olmo_routing::gate_product", mutates_args=())
def _gate_product(x_TD: Tensor, weight_ED: Tensor, mask_T: Tensor | None) -> Tensor:
    with without_autocast(x_TD.device.type):
        return F.linear(*_factors(x_TD, weight_ED, None if mask_T is None else mask_T[:, None]))


@_gate_product.register_fake
def _(x_TD: Tensor, weight_ED: Tensor, mask_T: Tensor | None) -> Tensor:
    dtype = _exact_dtype(x_TD, weight_ED)
    return x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0], dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _differentiate(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_TD, weight_ED, mask_T, logits_TE = ctx.saved_tensors
    taught_T1 = _taught(logits_TE, mask_T)
    grad_TE = torch.where(taught_T1, grad_TE, 0.0)
    grad_x_TD = grad_weight_ED = None
    # A backward that is called under autocast would otherwise multiply in its precision.
    with without_autocast(grad_TE.device.type):
        exact_x_TD, exact_weight_ED = _factors(x_TD, weight_ED, taught_T1)
        if ctx.needs_input_grad[0]:
            grad_x_TD = grad_TE @ exact_weight_ED
            grad_x_TD = torch.where(taught_T1, grad_x_TD, 0.0).to(x_TD.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight_ED = (grad_TE.T @ exact_x_TD).to(weight_ED.dtype)
    return grad_x_TD, grad_weight_ED, None


_gate_product.register_autograd(_differentiate, setup_context=_save)


def _exact_dtype(x_TD: Tensor, weight_ED: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x_TD.dtype, weight_ED.dtype), torch.float32)


def _factors(x_TD: Tensor, weight_ED: Tensor, kept_T1: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return both factors in the precision of the product; rows that are not kept are zeros."""
    dtype = _exact_dtype(x_TD, weight_ED)
    if kept_T1 is not None:
        x_TD = torch.where(kept_T1, x_TD, 0.0)
    return x_TD.to(dtype), weight_ED.to(dtype)


def _taught(logits_TE: Tensor, mask_T: Tensor | None) -> Tensor:
    """Return `taught_T1`: the rows that the backward goes through."""
    taught_T1 = logits_TE.isfinite().any(1, keepdim=True)
    return taught_T1 if mask_T is None else taught_T1 & mask_T[:, None]


def _plain_product(x_TD: Tensor, weight_ED: Tensor, mask_T: Tensor | None) -> Tensor:
    """Return the same logits and derivatives, of any kind and order, by torch's own operators."""
    with without_autocast(x_TD.device.type):
        mask_T1 = None if mask_T is None else mask_T[:, None]
        logits_TE = F.linear(*_factors(x_TD.detach(), weight_ED.detach(), mask_T1))
        taught_T1 = _taught(logits_TE, mask_T)
        product_TE = F.linear(*_factors(x_TD, weight_ED, taught_T1))
        return torch.where(taught_T1, product_TE, logits_TE)
