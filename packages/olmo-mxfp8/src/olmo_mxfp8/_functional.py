"""Differentiable products whose forward and input gradient run on MXFP8 operands.

For rows `x` and the weight `w` of their expert, with `q_K` quantising along the contraction K,

    forward           y  = q_D(x)  q_D(w)^T
    input gradient    dx = q_F(dy) q_F(w)
    weight gradient   dw = dy^T q_D(x)

The weight is quantised twice, along D and along F, because scales must lie along the contraction.
The weight gradient contracts over tokens, where neither operand has scales. It stays in high
precision: `dy` as it arrived, and the copy of `x` that the forward multiplied, dequantised. Keeping
that copy instead of `x` takes 33/32 bytes a value, and quantises nothing twice.

Shapes: R rows, D input width, F output width, E experts.
Source: OLMo-core 3 technical report, section 11 (equation 60); the E4M3 gradient default follows
NVIDIA's MXFP8 pre-training recipe (arXiv 2506.08027).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import reference
from ._formats import (
    Element,
    Granularity,
    ScaleRule,
    check_blocks,
    check_element,
    check_scaling,
    check_source,
)
from ._matmul import grouped_product, read_offsets
from ._quantize import dequantize, quantize
from ._tensor import MXTensor
from ._uncompiled import uncompiled


@dataclass(frozen=True, slots=True, kw_only=True)
class MXRecipe:
    """How a layer quantises.

    Args:
        element: The format of activations and weights in the forward, and of the weight in the
            input gradient.
        grad_element: The format of the output's gradient.
        scale_rule: `"rceil"` never saturates; `"floor"` is the rule of the OCP specification.
        granularity: Values that share one scale, 32 or 128.

    Raises:
        ValueError: A field is not one of its choices.
    """

    element: Element = "e4m3"
    grad_element: Element = "e4m3"
    scale_rule: ScaleRule = "rceil"
    granularity: Granularity = 32

    def __post_init__(self) -> None:
        check_element("element", self.element)
        check_element("grad_element", self.grad_element)
        check_scaling(self.scale_rule, self.granularity)


DEFAULT_RECIPE = MXRecipe()


def mx_linear(
    x: torch.Tensor, w: torch.Tensor, *, recipe: MXRecipe = DEFAULT_RECIPE
) -> torch.Tensor:
    """Return `x @ w.T` with MXFP8 operands, differentiable in both.

    Args:
        x: float32, bfloat16 or float16, `(.., D)`.
        w: One of the same dtypes, not necessarily that of `x`, `(F, D)`, as in `nn.Linear`.
        recipe: How both are quantised; D and F must be multiples of its granularity.

    Returns:
        The dtype of `x`, `(.., F)`, accumulated in float32, under autocast too. Gradients are
        accumulated in float32 and have the dtypes of `x` and `w`.

    Raises:
        TypeError: A dtype is another one.
        ValueError: The shapes, sizes or devices do not fit.
    """
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"`x` must be (.., D) and `w` (F, D), got {tuple(x.shape)} and {tuple(w.shape)}."
        )
    _check_sources("x", x, "w", w, recipe)
    rows_RD = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y_RF = _Product.apply(rows_RD, w.unsqueeze(0), [rows_RD.shape[0]], recipe)
    return y_RF.view(*x.shape[:-1], w.shape[0])


@uncompiled(reason="the reference form reads `offsets_E` on the host")
def mx_grouped_mm(
    x_RD: torch.Tensor,
    w_EFD: torch.Tensor,
    offsets_E: torch.Tensor,
    *,
    recipe: MXRecipe = DEFAULT_RECIPE,
) -> torch.Tensor:
    """Return `x @ w[e].T` for the rows of each expert `e`, with MXFP8 operands.

    Differentiable in `x_RD` and `w_EFD`. Rows past `offsets_E[-1]` are not read, in the forward nor
    in the backward, and are 0 in the output and in the gradient. An expert without rows has a
    weight gradient of exactly 0. Scales lie inside a row, so experts never share one and their
    numbers of rows may be anything.

    Args:
        x_RD: float32, bfloat16 or float16, `(R, D)`.
        w_EFD: One of the same dtypes, not necessarily that of `x_RD`, `(E, F, D)`.
        offsets_E: int32, `(E,)`, the inclusive ends of each expert's rows, ascending, at most R.
        recipe: How both are quantised; D and F must be multiples of its granularity.

    Returns:
        The dtype of `x_RD`, `(R, F)`, accumulated in float32, under autocast too. Gradients are
        accumulated in float32 and have the dtypes of `x_RD` and `w_EFD`.

    Raises:
        TypeError: A dtype is another one.
        ValueError: The shapes, sizes, devices or offsets do not fit.

    Note:
        The reference form reads `offsets_E` on the host; `torch.compile` breaks its graph here.
    """
    if x_RD.ndim != 2 or w_EFD.ndim != 3 or x_RD.shape[1] != w_EFD.shape[2]:
        raise ValueError(
            f"`x_RD` must be (R, D) and `w_EFD` (E, F, D), got {tuple(x_RD.shape)} and "
            f"{tuple(w_EFD.shape)}."
        )
    _check_sources("x_RD", x_RD, "w_EFD", w_EFD, recipe)
    ends = read_offsets(offsets_E, w_EFD.shape[0], x_RD.shape[0], x_RD.device)
    return _Product.apply(x_RD, w_EFD, ends, recipe)


def _check_sources(
    x_name: str, x: torch.Tensor, w_name: str, w: torch.Tensor, recipe: MXRecipe
) -> None:
    check_source(x_name, x)
    check_source(w_name, w)
    if x.device != w.device:
        raise ValueError(
            f"`{x_name}` and `{w_name}` must be on one device, got {x.device} and {w.device}."
        )
    check_blocks(f"D, `{w_name}.shape[-1]`,", w.shape[-1], recipe.granularity)
    check_blocks(f"F, `{w_name}.shape[-2]`,", w.shape[-2], recipe.granularity)


def _quantize(x: torch.Tensor, element: Element, recipe: MXRecipe) -> MXTensor:
    return quantize(
        x, element=element, scale_rule=recipe.scale_rule, granularity=recipe.granularity
    )


class _Product(torch.autograd.Function):
    """The equations of this module; saves the quantised rows (33/32 bytes a value) and `w`."""

    @staticmethod
    def forward(
        ctx: Any, x_RD: torch.Tensor, w_EFD: torch.Tensor, ends: list[int], recipe: MXRecipe
    ) -> torch.Tensor:
        rows = _quantize(x_RD[: ends[-1]], recipe.element, recipe)
        ctx.save_for_backward(rows.data, rows.scales, w_EFD)
        ctx.ends, ctx.recipe, ctx.x_dtype = ends, recipe, x_RD.dtype
        weights = _quantize(w_EFD, recipe.element, recipe)
        return grouped_product(rows, weights, ends, x_RD.shape[0], x_RD.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (once_differentiable)
        ctx: Any, dy_RF: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        data, scales, w_EFD = ctx.saved_tensors
        ends, recipe = ctx.ends, ctx.recipe
        num_rows, dy_RF = dy_RF.shape[0], dy_RF[: ends[-1]]
        dx_RD = dw_EFD = None
        if ctx.needs_input_grad[0]:
            dy = _quantize(dy_RF, recipe.grad_element, recipe)
            weights = _quantize(w_EFD.mT, recipe.element, recipe)
            dx_RD = grouped_product(dy, weights, ends, num_rows, ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            rows_RD = dequantize(MXTensor(data, scales, 1, recipe.element))
            dw_EFD = reference.grouped_outer_product(dy_RF.float(), rows_RD, ends).to(w_EFD.dtype)
        return dx_RD, dw_EFD, None, None
