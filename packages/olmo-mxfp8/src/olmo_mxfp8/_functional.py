"""Differentiable products whose forward and input gradient run on MXFP8 operands.

For rows `x` and the weight `w` of their expert, with `q_K` quantising along the contraction K,

    forward           y  = q_D(x)  q_D(w)^T
    input gradient    dx = q_F(dy) q_F(w)
    weight gradient   dw = dy^T q_D(x)

The weight is quantised twice, along D and along F, because scales must lie along the contraction.
The weight gradient contracts over tokens, where neither operand has scales. It stays in high
precision: `dy` as it arrived, and the copy of `x` that the forward multiplied, dequantised. Keeping
that copy instead of `x` takes 33/32 bytes a value, and quantises nothing twice. A recipe may ask
for `dw = q_R(dy)^T q_R(q_D(x))`, quantised along the rows of each expert; the copy of `x` serves
there too, because requantising with other powers of two costs nothing (`test_accuracy.py`). With
coarse scales Hopper's FP8 units multiply those codes (`_token_kernels.py`).

Shapes: R rows, D input width, F output width, E experts.
Source: OLMo-core 3 technical report, section 11 (equation 60); the E4M3 gradient default follows
NVIDIA's MXFP8 pre-training recipe (arXiv 2506.08027).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import reference
from ._deferral import Defer, Later, ask, check_defer
from ._expert_padding import pad_experts
from ._formats import Element, check_source
from ._groups import Groups, read_groups, whole
from ._product_impl import ProductImpl, pick_product
from ._product_kernels import row_product
from ._products import multiply_across_rows, multiply_rows, operand_dtype
from ._quantize import dequantize, quantize
from ._recipe import DEFAULT_RECIPE, MXRecipe, check_recipe
from ._scaled_mm import as_stack
from ._tensor import MXTensor
from ._token_kernels import multiply_across_tokens
from ._uncompiled import uncompiled
from ._weight_cache import WeightCache, check_is_cache, check_weight, quantize_weight


def mx_linear(
    x: Tensor,
    w: Tensor,
    *,
    recipe: MXRecipe = DEFAULT_RECIPE,
    cache: WeightCache | None = None,
    defer: Defer | None = None,
) -> Tensor:
    """Return `x @ w.T` with MXFP8 operands, differentiable in both.

    Args:
        x: float32, bfloat16 or float16, `(.., D)`.
        w: One of the same dtypes, not necessarily that of `x`, `(F, D)`, as in `nn.Linear`.
        recipe: How both are quantised; D and F must be multiples of its granularity.
        cache: `w` already quantised, by the same recipe; None quantises it in each call.
        defer: Asked in each call whether the gradient of `w`, if that is an `nn.Parameter`, may be
            computed later than backward, with the same bits: see `Defer`. None: not asked.

    Returns:
        The dtype of `x`, `(.., F)`, accumulated in float32, under autocast too. Gradients are
        accumulated in float32 and have the dtypes of `x` and `w`.

    Raises:
        TypeError: A dtype is another one, or an argument has another type.
        ValueError: The shapes, sizes or devices do not fit, `cache` is of another weight or recipe,
            or the implementation that the recipe names cannot run.
        RuntimeError: `cache` is stale.

    Note:
        Saved for backward: `w`, and the codes and scales of `x` that were multiplied, 33/32 bytes a
        value, whatever the recipe's `saved`. The latter, and the gradient of the output, are held
        until a deferred gradient is computed. With `defer`, `torch.compile` breaks its graph here.
    """
    if defer is not None:
        return _asking_linear(x, w, recipe, cache, defer)
    return _linear(x, w, recipe, cache, None)


def _linear(
    x: Tensor, w: Tensor, recipe: MXRecipe, cache: WeightCache | None, defer: Defer | None
) -> Tensor:
    _check_sources("x", x, "w", w, recipe)
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"`x` must be (.., D) and `w` (F, D), got {tuple(x.shape)} and {tuple(w.shape)}."
        )
    check_weight("w", w, recipe)
    check_cache(cache, "w", w, recipe)
    rows_RD = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    R = rows_RD.shape[0]
    impl = pick_for(recipe, x.device, R, 1, *w.shape)
    groups = whole(R, x.device, impl)
    later = ask(defer, {"w": w})
    if later is not None:
        y_RF = _product_that_waits(later, rows_RD, groups, recipe, impl, cache)
    else:
        y_RF = _Product.apply(
            rows_RD, w.unsqueeze(0), groups.offsets_E, groups.ends, recipe, impl, cache
        )
    return y_RF.view(*x.shape[:-1], w.shape[0])


@uncompiled(reason="`defer` may be any function")
def _asking_linear(
    x: Tensor, w: Tensor, recipe: MXRecipe, cache: WeightCache | None, defer: Defer
) -> Tensor:
    check_defer(defer)
    return _linear(x, w, recipe, cache, defer)


@uncompiled(reason="the reference form reads `offsets_E` on the host")
def mx_grouped_mm(
    x_RD: Tensor,
    w_EFD: Tensor,
    offsets_E: Tensor,
    *,
    recipe: MXRecipe = DEFAULT_RECIPE,
    cache: WeightCache | None = None,
    defer: Defer | None = None,
) -> Tensor:
    """Return `x @ w[e].T` for the rows of each expert `e`, with MXFP8 operands.

    Differentiable in `x_RD` and `w_EFD`. Rows past `offsets_E[-1]` reach nothing, in the forward
    nor in the backward, and are 0 in the output and in the gradient. An expert without rows has a
    weight gradient of exactly 0. Scales lie inside a row, so experts never share one and their
    numbers of rows may be anything.

    Args:
        x_RD: float32, bfloat16 or float16, `(R, D)`.
        w_EFD: One of the same dtypes, not necessarily that of `x_RD`, `(E, F, D)`.
        offsets_E: int32, `(E,)`, the inclusive ends of each expert's rows, ascending, at most R.
        recipe: How both are quantised; D and F must be multiples of its granularity.
        cache: `w_EFD` already quantised, by the same recipe; None quantises it in each call.
        defer: As for `mx_linear`.

    Returns:
        The dtype of `x_RD`, `(R, F)`, accumulated in float32, under autocast too. Gradients are
        accumulated in float32 and have the dtypes of `x_RD` and `w_EFD`.

    Raises:
        TypeError: A dtype is another one, or an argument has another type.
        ValueError: The shapes, sizes, devices or offsets do not fit, `cache` is of another weight
            or recipe, or the implementation that the recipe names cannot run.
        RuntimeError: `cache` is stale.

    Note:
        Saved for backward: `w_EFD`, `offsets_E`, and the codes and scales of `x_RD` that were
        multiplied, 33/32 bytes a value, whatever the recipe's `saved`. The codes, the scales and
        the gradient of the output are held until a deferred gradient is computed.

        The reference form reads `offsets_E` on the host; the kernels do not. `torch.compile` breaks
        its graph here.
    """
    check_defer(defer)
    _check_sources("x_RD", x_RD, "w_EFD", w_EFD, recipe)
    if x_RD.ndim != 2 or w_EFD.ndim != 3 or x_RD.shape[1] != w_EFD.shape[2]:
        raise ValueError(
            f"`x_RD` must be (R, D) and `w_EFD` (E, F, D), got {tuple(x_RD.shape)} and "
            f"{tuple(w_EFD.shape)}."
        )
    check_weight("w_EFD", w_EFD, recipe)
    check_cache(cache, "w_EFD", w_EFD, recipe)
    impl = pick_for(recipe, x_RD.device, x_RD.shape[0], *w_EFD.shape)
    groups = read_groups(offsets_E, w_EFD.shape[0], x_RD.shape[0], x_RD.device, impl)
    later = ask(defer, {"w": w_EFD})
    if later is not None:
        return _product_that_waits(later, x_RD, groups, recipe, impl, cache)
    return _Product.apply(x_RD, w_EFD, groups.offsets_E, groups.ends, recipe, impl, cache)


def pick_for(
    recipe: MXRecipe, device: torch.device, num_rows: int, num_experts: int, *widths: int
) -> ProductImpl:
    """Name the implementation of a layer's products, or raise when the recipe's cannot run."""
    granularities = (recipe.granularity, recipe.weight_granularity)
    return pick_product(recipe.impl, device, granularities, num_rows, num_experts, *widths)


def check_cache(cache: WeightCache | None, name: str, w: Tensor, recipe: MXRecipe) -> None:
    """Raise unless `cache` is None or a `WeightCache` of `w` and `recipe`."""
    if cache is None:
        return
    check_is_cache("cache", cache)
    if cache.weight is not w:
        raise ValueError(
            f"`cache` must be that of `{name}`, got the cache of another tensor; make one of "
            f"`{name}`, or call `refresh()` on the layer."
        )
    if cache.recipe != recipe:
        raise ValueError(f"`cache` must have the `recipe` {recipe}, got {cache.recipe}.")


def _check_sources(x_name: str, x: Tensor, w_name: str, w: Tensor, recipe: MXRecipe) -> None:
    check_recipe(recipe)
    check_source(x_name, x)
    check_source(w_name, w)
    if x.device != w.device:
        raise ValueError(
            f"`{x_name}` and `{w_name}` must be on one device, got {x.device} and {w.device}."
        )


def quantize_rows(x: Tensor, element: Element, recipe: MXRecipe, dim: int = -1) -> MXTensor:
    """Return `x` quantised as `recipe` says."""
    return quantize(
        x,
        dim=dim,
        element=element,
        scale_rule=recipe.scale_rule,
        granularity=recipe.granularity,
        impl=recipe.quantise_impl,
    )


def input_gradient(
    dy_RF: Tensor | MXTensor,
    w_EFD: Tensor,
    weights: MXTensor | Tensor | None,
    groups: Groups,
    recipe: MXRecipe,
    impl: ProductImpl,
    dtype: torch.dtype,
) -> Tensor:
    """Return `dx`, `(R, D)`, with the precision of the recipe.

    Args:
        dy_RF: The gradient of the output, which is quantised here if it has to be and is not.
        w_EFD: The weights.
        weights: `w_EFD.mT` quantised, or its values, if that is there already.
        groups: Where the rows of the experts end.
        recipe: How both are quantised.
        impl: Which implementation multiplies.
        dtype: Of the result.
    """
    if isinstance(dy_RF, MXTensor) or recipe.input_grad == "mxfp8":
        is_quantised = isinstance(dy_RF, MXTensor)
        dy = dy_RF if is_quantised else quantize_rows(dy_RF, recipe.grad_element, recipe)
        weights = quantize_weight(w_EFD.mT, recipe) if weights is None else weights
        return multiply_rows(dy, weights, groups, impl, dtype)
    if impl == "reference":
        assert groups.ends is not None, "the reference takes the ends as integers"
        dy, w = dy_RF[: groups.ends[-1]].float(), w_EFD.float()
        return reference.grouped_product(dy, w.mT, groups.ends, dy_RF.shape[0]).to(dtype)
    operand = operand_dtype(dy_RF.device)
    return row_product(dy_RF.to(operand), w_EFD.mT.to(operand), groups.offsets_E, dtype)


def weight_gradient(
    dy_RF: Tensor | MXTensor,
    rows: MXTensor,
    groups: Groups,
    recipe: MXRecipe,
    impl: ProductImpl,
    dtype: torch.dtype,
) -> Tensor:
    """Return `dw`, `(E, F, D)`, from the quantised rows, with the precision of the recipe.

    MXFP8 is multiplied as such by "coarse" alone, and dequantised by every other implementation.
    """
    if recipe.weight_grad == "mxfp8" and impl == "coarse":
        return multiply_across_tokens(dy_RF, rows, groups, recipe, dtype)
    operand = torch.float32 if impl == "reference" else operand_dtype(rows.device)
    x_RD = dequantize(rows, operand)
    if isinstance(dy_RF, MXTensor):
        dy_RF = dequantize(dy_RF, operand)
    if recipe.weight_grad == "mxfp8":
        (dy_RF, x_RD), groups = pad_experts([dy_RF, x_RD], groups, recipe.granularity)
        dy = quantize_rows(dy_RF, recipe.grad_element, recipe, dim=0)
        x = quantize_rows(x_RD, recipe.element, recipe, dim=0)
        dy_RF, x_RD = dequantize(dy, operand), dequantize(x, operand)
    return multiply_across_rows(dy_RF, x_RD, groups, impl, dtype)


class _Product(torch.autograd.Function):
    """The equations of this module; saves the quantised rows (33/32 bytes a value) and `w`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        w_EFD: Tensor,
        offsets_E: Tensor,
        ends: list[int] | None,
        recipe: MXRecipe,
        impl: ProductImpl,
        cache: WeightCache | None,
    ) -> Tensor:
        rows = quantize_rows(x_RD, recipe.element, recipe)
        weights = quantize_weight(w_EFD, recipe) if cache is None else _stack(cache.forward_operand)
        ctx.save_for_backward(rows.data, rows.scales, w_EFD, offsets_E)
        ctx.ends, ctx.recipe, ctx.impl, ctx.cache = ends, recipe, impl, cache
        ctx.x_dtype = x_RD.dtype
        return multiply_rows(rows, weights, Groups(ends, offsets_E), impl, x_RD.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (once_differentiable)
        ctx: Any, dy_RF: Tensor
    ) -> tuple[Tensor | None, ...]:
        data, scales, w_EFD, offsets_E = ctx.saved_tensors
        recipe, impl, groups = ctx.recipe, ctx.impl, Groups(ctx.ends, offsets_E)
        dx_RD = dw_EFD = None
        if ctx.needs_input_grad[0]:
            dx_RD = _rows_gradient(ctx, dy_RF, w_EFD, groups)
        if ctx.needs_input_grad[1]:
            rows = MXTensor(data, scales, 1, recipe.element, recipe.granularity)
            dw_EFD = weight_gradient(dy_RF, rows, groups, recipe, impl, w_EFD.dtype)
        return dx_RD, dw_EFD, None, None, None, None, None


class _WaitingProduct(torch.autograd.Function):
    """The same, with the weight gradient left for later; the weight is no input of its graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x_RD: Tensor, later: Later, *others: Any) -> Tensor:
        w = later.weights["w"]
        ctx.later = later
        return _Product.forward(ctx, x_RD, w if w.ndim == 3 else w.unsqueeze(0), *others)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (once_differentiable)
        ctx: Any, dy_RF: Tensor
    ) -> tuple[Tensor | None, ...]:
        data, scales, w_EFD, offsets_E = ctx.saved_tensors
        recipe, impl, groups = ctx.recipe, ctx.impl, Groups(ctx.ends, offsets_E)
        dx_RD = None
        if ctx.needs_input_grad[1]:
            dx_RD = _rows_gradient(ctx, dy_RF, w_EFD, groups)
        rows = MXTensor(data, scales, 1, recipe.element, recipe.granularity)
        arguments = (dy_RF.detach(), rows, groups, recipe, impl, w_EFD.dtype)
        shape = ctx.later.weights["w"].shape
        ctx.later.leave("w", lambda: weight_gradient(*arguments).view(shape))
        ctx.later.hand_over()
        return None, dx_RD, None, None, None, None, None, None


def _product_that_waits(
    later: Later,
    x_RD: Tensor,
    groups: Groups,
    recipe: MXRecipe,
    impl: ProductImpl,
    cache: WeightCache | None,
) -> Tensor:
    others = (groups.offsets_E, groups.ends, recipe, impl, cache)
    return _WaitingProduct.apply(later.anchor, x_RD, later, *others)


def _rows_gradient(ctx: Any, dy_RF: Tensor, w_EFD: Tensor, groups: Groups) -> Tensor:
    quantised = None
    if ctx.cache is not None and ctx.recipe.input_grad == "mxfp8":
        quantised = _stack(ctx.cache.input_grad_operand)
    return input_gradient(dy_RF, w_EFD, quantised, groups, ctx.recipe, ctx.impl, ctx.x_dtype)


def _stack(weights: MXTensor | Tensor) -> MXTensor | Tensor:
    if len(weights.shape) == 3:
        return weights
    return as_stack(weights) if isinstance(weights, MXTensor) else weights.unsqueeze(0)
