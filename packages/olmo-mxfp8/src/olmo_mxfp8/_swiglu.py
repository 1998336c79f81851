"""`swiglu_quantize` and its gradient: the hidden layer of an expert, quantised as it is computed.

For rows `[gate, up]` and the weight `w` of a row's route,

    act      = w silu(gate) up                        quantised along H
    d_gate   = w d_act up (s + silu(gate) (1 - s))    quantised along 2H, with s = sigmoid(gate)
    d_up     = w d_act silu(gate)
    d_w      = sum d_act silu(gate) up                over H

in float32, rounded once, to the elements. The gradient goes straight through the quantisation.

Shapes: R rows, H hidden width. Source: Shazeer, arXiv:2002.05202 (SwiGLU).
"""

from torch import Tensor

from . import _quantize_kernels, reference
from ._formats import (
    FORMATS,
    Element,
    RowGranularity,
    ScaleRule,
    check_blocks,
    check_element,
    check_row_granularity,
    check_row_weights,
    check_scale_rule,
    check_source,
)
from ._quantize import quantize
from ._quantize_impl import Impl, pick
from ._tensor import MXTensor


def swiglu_quantize(
    hidden_R2H: Tensor,
    *,
    row_weights_R: Tensor | None = None,
    element: Element = "e4m3",
    scale_rule: ScaleRule = "rceil",
    granularity: RowGranularity = 32,
    impl: Impl = "auto",
) -> MXTensor:
    """Return `w silu(gate) up` in MXFP8, without a pass over memory between the two.

    Args:
        hidden_R2H: float32, bfloat16 or float16, `(R, 2H)`: gate columns first, then up columns. H
            must be a multiple of `granularity`.
        row_weights_R: One of the same dtypes, `(R,)`: what each row is multiplied by; None for 1.
        element: As for `quantize`.
        scale_rule: As for `quantize`.
        granularity: 32, or 128: four adjacent blocks share a scale.
        impl: `"reference"` is plain torch, `"triton"` one kernel, as for `quantize`. The kernel has
            an exponential of its own: an activation may differ from the reference's in the last
            bits of float32, and then be rounded to the next code. `"auto"` is `"triton"` on CUDA
            where that can run.

    Returns:
        `(R, H)`, quantised along H: the values of float32, rounded once. It carries no gradient;
        `swiglu_quantize_backward` computes that.

    Raises:
        TypeError: A dtype is another one.
        ValueError: A shape, size, device or option does not fit, or the named `impl` cannot run.
    """
    _check(hidden_R2H, row_weights_R, element, scale_rule, granularity)
    hidden_R2H = hidden_R2H.detach()
    weights_R = None if row_weights_R is None else row_weights_R.detach()
    if pick(impl, hidden_R2H.device):
        codes, scales = _quantize_kernels.swiglu_quantize(
            hidden_R2H, weights_R, element, scale_rule == "rceil", granularity
        )
        return MXTensor(codes.view(FORMATS[element].dtype), scales, 1, element, granularity)
    return quantize(
        reference.swiglu(hidden_R2H, weights_R),
        element=element,
        scale_rule=scale_rule,
        granularity=granularity,
        impl="reference",
    )


def swiglu_quantize_backward(
    d_act_RH: Tensor,
    hidden_R2H: Tensor,
    *,
    row_weights_R: Tensor | None = None,
    element: Element = "e4m3",
    scale_rule: ScaleRule = "rceil",
    granularity: RowGranularity = 32,
    impl: Impl = "auto",
) -> tuple[MXTensor, Tensor | None]:
    """Return the gradient of `hidden_R2H` in MXFP8, and that of `row_weights_R`.

    Args:
        d_act_RH: float32, bfloat16 or float16, `(R, H)`: the gradient of the activation, through
            whose quantisation it goes as if there were none.
        hidden_R2H: As for `swiglu_quantize`.
        row_weights_R: As there.
        element: The format of the gradient.
        scale_rule: As there.
        granularity: As there.
        impl: As there.

    Returns:
        `(R, 2H)`, quantised along 2H, where the product with the first weights contracts; and
        float32 `(R,)`, or None without `row_weights_R`.

    Raises:
        TypeError: A dtype is another one.
        ValueError: A shape, size, device or option does not fit, or the named `impl` cannot run.
    """
    _check(hidden_R2H, row_weights_R, element, scale_rule, granularity)
    check_source("d_act_RH", d_act_RH)
    R, H = hidden_R2H.shape[0], hidden_R2H.shape[1] // 2
    if tuple(d_act_RH.shape) != (R, H) or d_act_RH.device != hidden_R2H.device:
        raise ValueError(
            f"`d_act_RH` must be {(R, H)} on {hidden_R2H.device}, as `hidden_R2H` is "
            f"{tuple(hidden_R2H.shape)}, got {tuple(d_act_RH.shape)} on {d_act_RH.device}."
        )
    d_act_RH, hidden_R2H = d_act_RH.detach(), hidden_R2H.detach()
    weights_R = None if row_weights_R is None else row_weights_R.detach()
    if pick(impl, hidden_R2H.device):
        codes, scales, parts = _quantize_kernels.swiglu_quantize_backward(
            d_act_RH, hidden_R2H, weights_R, element, scale_rule == "rceil", granularity
        )
        data = codes.view(FORMATS[element].dtype)
        d_hidden = MXTensor(data, scales, 1, element, granularity)
        return d_hidden, None if weights_R is None else parts.sum(1)
    d_hidden_R2H, d_weights_R = reference.swiglu_gradients(d_act_RH, hidden_R2H, weights_R)
    d_hidden = quantize(
        d_hidden_R2H,
        element=element,
        scale_rule=scale_rule,
        granularity=granularity,
        impl="reference",
    )
    return d_hidden, None if weights_R is None else d_weights_R


def _check(
    hidden_R2H: Tensor,
    row_weights_R: Tensor | None,
    element: Element,
    scale_rule: ScaleRule,
    granularity: RowGranularity,
) -> None:
    check_source("hidden_R2H", hidden_R2H)
    check_element("element", element)
    check_scale_rule(scale_rule)
    if hidden_R2H.ndim != 2 or hidden_R2H.shape[1] % 2:
        raise ValueError(
            f"`hidden_R2H` must be (R, 2H), gate columns and as many up columns, got "
            f"{tuple(hidden_R2H.shape)}."
        )
    check_row_granularity(granularity)
    check_blocks("H, half of `hidden_R2H.shape[1]`,", hidden_R2H.shape[1] // 2, granularity)
    if row_weights_R is not None:
        check_row_weights(row_weights_R, "hidden_R2H", hidden_R2H)
