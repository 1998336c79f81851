"""The product of a gate, in float32, without a float32 copy of the tokens kept for backward.

A router reads tokens of the model's precision, 2 bytes an element, and multiplies them in float32.
Autograd would keep that float32 copy, 4 T D bytes a layer, until the gradient of the weight is
computed. Here backward keeps the tokens as they came, which the layer holds anyway, and converts
them again: the conversion is exact, so that the gradient is bit for bit the same.

Shapes: T tokens, E experts, D model width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def gate_product(x_TD: Tensor, weight_ED: Tensor, mask_T: Tensor | None) -> Tensor:
    """Return `logits_TE = x @ weight.T`, at least float32, whatever autocast says.

    Args:
        x_TD: any floating dtype.
        weight_ED: any floating dtype.
        mask_T: bool; rows where it is False count as zeros, whatever they hold, and get gradients
            of zero.

    Returns:
        float32, or float64 when one of the factors is. Backward keeps the three arguments
        themselves.
    """
    return _gate_product(x_TD, weight_ED, mask_T)


# An op rather than an autograd.Function: torch.compile takes it as one node, without a warning.
@torch.library.custom_op("olmo_routing::gate_product", mutates_args=())
def _gate_product(x_TD: Tensor, weight_ED: Tensor, mask_T: Tensor | None) -> Tensor:
    with torch.autocast(x_TD.device.type, enabled=False):
        return F.linear(*_factors(x_TD, weight_ED, mask_T))


@_gate_product.register_fake
def _(x_TD: Tensor, weight_ED: Tensor, mask_T: Tensor | None) -> Tensor:
    dtype = _exact_dtype(x_TD, weight_ED)
    return x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0], dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_TD, weight_ED, mask_T = ctx.saved_tensors
    grad_x_TD = grad_weight_ED = None
    # A backward that is called under autocast would otherwise multiply in its precision.
    with torch.autocast(grad_TE.device.type, enabled=False):
        exact_x_TD, exact_weight_ED = _factors(x_TD, weight_ED, mask_T)
        if ctx.needs_input_grad[0]:
            grad_x_TD = grad_TE @ exact_weight_ED
            if mask_T is not None:
                grad_x_TD = torch.where(mask_T[:, None], grad_x_TD, 0.0)
            grad_x_TD = grad_x_TD.to(x_TD.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight_ED = (grad_TE.T @ exact_x_TD).to(weight_ED.dtype)
    return grad_x_TD, grad_weight_ED, None


_gate_product.register_autograd(_differentiate, setup_context=_save)


def _exact_dtype(x_TD: Tensor, weight_ED: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x_TD.dtype, weight_ED.dtype), torch.float32)


def _factors(x_TD: Tensor, weight_ED: Tensor, mask_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return both factors in the precision of the product."""
    dtype = _exact_dtype(x_TD, weight_ED)
    x_TD = x_TD.to(dtype)
    if mask_T is not None:
        # The weight's gradient multiplies every row by a gradient of 0 or not: 0 * NaN is NaN.
        x_TD = torch.where(mask_T[:, None], x_TD, 0.0)
    return x_TD, weight_ED.to(dtype)
