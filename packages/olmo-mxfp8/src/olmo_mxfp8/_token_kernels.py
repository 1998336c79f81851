"""The weight gradient on Hopper's FP8 units, as torch operators.

    dw[e] = q_R(dy)^T q_R(x)        over the rows of expert e

Both operands are quantised along the rows of each expert, 128 at a time, and the codes of a column
stored side by side. Nothing here reads the device from the host.

Shapes: R rows, E experts, F and D columns, P places of 128 rows, T = 128 P.
"""

import torch
from torch import Tensor

from ._formats import COARSE, Element
from ._groups import Groups
from ._product_kernels import _dense
from ._quantize_kernels import element_format
from ._recipe import MXRecipe
from ._tensor import MXTensor


def multiply_across_tokens(
    dy_RF: Tensor | MXTensor,
    rows: MXTensor,
    groups: Groups,
    recipe: MXRecipe,
    dtype: torch.dtype,
) -> Tensor:
    """Return `dw`, `(E, F, D)`, of operands quantised along the rows of each expert.

    Args:
        dy_RF: The gradient of the output, `(R, F)`, as it is or in MXFP8 along F; F is a multiple
            of 128.
        rows: `(R, D)`, quantised along D, a multiple of 128.
        groups: Where the rows of the experts end.
        recipe: The element formats and the rule of the scales.
        dtype: Of the result.
    """
    offsets_E = groups.offsets_E
    a_FT, a_scales = _quantised(dy_RF, offsets_E, recipe.grad_element, recipe)
    b_DT, b_scales = _quantised(rows, offsets_E, recipe.element, recipe)
    elements = recipe.grad_element, recipe.element
    return token_product(a_FT, a_scales, b_DT, b_scales, *elements, offsets_E, rows.shape[0], dtype)


def _quantised(
    x: Tensor | MXTensor, offsets_E: Tensor, element: Element, recipe: MXRecipe
) -> tuple[Tensor, Tensor]:
    rceil = recipe.scale_rule == "rceil"
    if isinstance(x, MXTensor):
        codes = x.data.view(torch.uint8)
        return quantize_tokens(codes, x.scales, x.element, offsets_E, element, rceil)
    return quantize_tokens(x, None, None, offsets_E, element, rceil)


@torch.library.custom_op("olmo_mxfp8::quantize_tokens", mutates_args=())
def quantize_tokens(
    x_RD: Tensor,
    scales: Tensor | None,
    source: str | None,
    offsets_E: Tensor,
    element: str,
    rceil: bool,
) -> tuple[Tensor, Tensor]:
    """Return codes (D, T) and scales (P, D), float32, along the rows of each expert.

    `x_RD` holds values, or codes of the format `source` along D under `scales`, (R, D / 32).
    """
    from ._triton import quantize_tokens as kernels

    if x_RD.numel() == 0:
        return _operand(x_RD, offsets_E)
    with torch.cuda.device_of(x_RD):
        return kernels.quantize_tokens(
            x_RD.contiguous(),
            None if scales is None else scales.contiguous(),
            None if source is None else element_format(source),
            offsets_E.contiguous(),
            element_format(element),
            rceil=rceil,
        )


@torch.library.custom_op("olmo_mxfp8::token_product", mutates_args=())
def token_product(
    a_FT: Tensor,
    a_scales: Tensor,
    b_DT: Tensor,
    b_scales: Tensor,
    a_element: str,
    b_element: str,
    offsets_E: Tensor,
    num_rows: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return `dw`, (E, F, D), of two operands of `quantize_tokens`; 0 for an expert without rows.

    Its error is that of `"coarse"` in `scaled_grouped_mm`. F and D are multiples of 128.
    """
    from ._triton.token_product import token_product as kernel

    shape = (offsets_E.numel(), a_FT.shape[0], b_DT.shape[0])
    if num_rows == 0 or 0 in shape:
        return a_FT.new_zeros(shape, dtype=out_dtype)
    with torch.cuda.device_of(a_FT):
        return kernel(
            _dense(a_FT).view(element_format(a_element).dtype),
            a_scales.contiguous(),
            _dense(b_DT).view(element_format(b_element).dtype),
            b_scales.contiguous(),
            offsets_E.contiguous(),
            num_rows,
            out_dtype,
        )


def _operand(x_RD: Tensor, offsets_E: Tensor) -> tuple[Tensor, Tensor]:
    (R, D), E = x_RD.shape, offsets_E.shape[0]
    places = R // COARSE + E
    codes = x_RD.new_empty(D, COARSE * places, dtype=torch.uint8)
    return codes, x_RD.new_empty(places, D, dtype=torch.float32)


@quantize_tokens.register_fake
def _(
    x_RD: Tensor,
    scales: Tensor | None,
    source: str | None,
    offsets_E: Tensor,
    element: str,
    rceil: bool,
) -> tuple[Tensor, Tensor]:
    return _operand(x_RD, offsets_E)


@token_product.register_fake
def _(
    a_FT: Tensor,
    a_scales: Tensor,
    b_DT: Tensor,
    b_scales: Tensor,
    a_element: str,
    b_element: str,
    offsets_E: Tensor,
    num_rows: int,
    out_dtype: torch.dtype,
) -> Tensor:
    return a_FT.new_empty(offsets_E.shape[0], a_FT.shape[0], b_DT.shape[0], dtype=out_dtype)
