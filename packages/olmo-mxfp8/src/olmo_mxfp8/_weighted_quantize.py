"""Rows times the weights of their routes, quantised in the same pass.

The backward of a combine hands each expert the gradient of a token's output times the weight of
the route, and the first product of the expert takes that in MXFP8.

Shapes: R rows, D model width.
"""

from torch import Tensor

from . import _quantize_kernels
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


def weighted_quantize(
    x_RD: Tensor,
    row_weights_R: Tensor,
    *,
    element: Element = "e4m3",
    scale_rule: ScaleRule = "rceil",
    granularity: RowGranularity = 32,
    impl: Impl = "auto",
) -> MXTensor:
    """Return `w x` in MXFP8, without a pass over memory between the two.

    The products are those of float32, rounded to float32, as in `swiglu_quantize`. What is not
    finite, and 0 times that, makes its block NaN, as in `quantize`.

    Args:
        x_RD: float32, bfloat16 or float16, `(R, D)`. D must be a multiple of `granularity`.
        row_weights_R: One of the same dtypes, `(R,)`: what each row is multiplied by.
        element: As for `quantize`.
        scale_rule: As for `quantize`.
        granularity: 32, or 128: four adjacent blocks share a scale.
        impl: As for `quantize`; the bits are the same.

    Returns:
        `(R, D)`, quantised along D. It carries no gradient.

    Raises:
        TypeError: A dtype is another one.
        ValueError: A shape, size, device or option does not fit, or the named `impl` cannot run.
    """
    check_source("x_RD", x_RD)
    check_element("element", element)
    check_scale_rule(scale_rule)
    if x_RD.ndim != 2:
        raise ValueError(f"`x_RD` must have two dimensions, got shape {tuple(x_RD.shape)}.")
    check_row_granularity(granularity)
    check_blocks("`x_RD.shape[1]`", x_RD.shape[1], granularity)
    check_row_weights(row_weights_R, "x_RD", x_RD)
    x_RD, weights_R = x_RD.detach(), row_weights_R.detach()
    if pick(impl, x_RD.device):
        codes, scales = _quantize_kernels.weighted_quantize(
            x_RD, weights_R, element, scale_rule == "rceil", granularity
        )
        return MXTensor(codes.view(FORMATS[element].dtype), scales, 1, element, granularity)
    return quantize(
        x_RD.float() * weights_R.float()[:, None],
        element=element,
        scale_rule=scale_rule,
        granularity=granularity,
        impl="reference",
    )
