"""The experts of a layer on MXFP8 operands: two grouped products around a fused activation.

For the rows `x` of an expert, the weights `W1` (2H, D) and `W2` (D, H), and the weight `w` of each
row's route,

    h  = q_D(x) q_D(W1)^T               [gate, up]
    a  = q_H(w silu(gate) up)           quantised as it is computed
    y  = a q_H(W2)^T
    da = q_D(dy) q_D(W2)                straight through the quantisation of a
    dh = q_2H(dswiglu(da, h))           quantised as it is computed
    dx = dh q_2H(W1)
    dW2 = dy^T a,  dW1 = dh^T q_D(x)

Backward keeps `q_D(x)` and `h`; `a` is made again from `h`. `dh` exists in MXFP8 alone, so `dW1`
multiplies two dequantised copies, as OLMo-core 3 does for every weight. With `input_grad="high"`
nothing that flows backward is quantised, `dh` neither. The gradient of a weight that waits is made
of what stands there, `dy` and `a`, or `dh` and `q_D(x)`, which are held until then.

Shapes: R rows, E experts, D model width, H hidden width.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import reference
from ._deferral import Defer, Later, Work, ask, check_defer
from ._formats import check_source
from ._functional import (
    check_cache,
    input_gradient,
    pick_for,
    quantize_rows,
    weight_gradient,
)
from ._groups import Groups, read_groups
from ._product_impl import ProductImpl
from ._products import multiply_rows
from ._quantize import dequantize
from ._recipe import DEFAULT_RECIPE, MXRecipe, check_recipe
from ._swiglu import swiglu_quantize, swiglu_quantize_backward
from ._tensor import MXTensor
from ._uncompiled import uncompiled
from ._weight_cache import WeightCache, check_is_cache, check_weight, quantize_weight

_UP, _DOWN = "w_gate_up_E2HD", "w_down_EDH"


@uncompiled(reason="the reference form reads `offsets_E` on the host")
def mx_swiglu_experts(
    x_RD: Tensor,
    w_gate_up_E2HD: Tensor,
    w_down_EDH: Tensor,
    offsets_E: Tensor,
    *,
    row_weights_R: Tensor | None = None,
    recipe: MXRecipe = DEFAULT_RECIPE,
    caches: tuple[WeightCache, WeightCache] | None = None,
    defer: Defer | None = None,
) -> Tensor:
    """Return `w (silu(gate) up) @ w_down[e].T` with `[gate, up] = x @ w_gate_up[e].T`, in MXFP8.

    Differentiable in everything but the offsets. Rows past `offsets_E[-1]` reach nothing, and are 0
    in the output and in the gradients. An expert without rows has weight gradients of exactly 0.

    Args:
        x_RD: float32, bfloat16 or float16, `(R, D)`, sorted by expert.
        w_gate_up_E2HD: One of the same dtypes, `(E, 2H, D)`: gate rows first, then up rows.
        w_down_EDH: One of the same dtypes, `(E, D, H)`.
        offsets_E: int32, `(E,)`, the inclusive ends of each expert's rows, ascending, at most R.
        row_weights_R: One of the same dtypes, `(R,)`, what each row is multiplied by; None for 1.
        recipe: How operands are quantised; D and H must be multiples of its granularity.
        caches: Both weights already quantised, by the same recipe; None quantises them each call.
        defer: Asked in each call whether the gradients of the weights, where they are
            `nn.Parameter`, may be computed later than backward, with the same bits: see `Defer`.
            None: not asked.

    Returns:
        The dtype of `x_RD`, `(R, D)`. Products are accumulated in float32.

    Raises:
        TypeError: A dtype is another one, or an argument has another type.
        ValueError: The shapes, sizes, devices or offsets do not fit, a cache is of another weight
            or recipe, or the implementation that the recipe names cannot run.
        RuntimeError: A cache is stale.

    Note:
        Saved for backward, in bytes: `33/32 R D` for `x`, and for the hidden layer `2 R H` times
        the bytes of the dtype, or `33/16 R H` with the recipe's `saved="mxfp8"`. With that, the
        gradients are those of the rounded hidden layer.

        Held until deferred gradients are computed, in bytes: `33/32 R (D + 3 H)`, with
        `input_grad="high"` `33/32 R (D + H)` and `8 R H`, and the gradient of the output.
    """
    check_defer(defer)
    check_recipe(recipe)
    _check_shapes(x_RD, w_gate_up_E2HD, w_down_EDH, row_weights_R)
    weights = {_UP: w_gate_up_E2HD, _DOWN: w_down_EDH}
    for name, w in weights.items():
        check_weight(name, w, recipe)
    if caches is not None:
        _check_caches(caches, weights, recipe)
    E, width, D = w_gate_up_E2HD.shape
    # A block of the hidden layer must not span gate and up, which a multiple for H alone ensures.
    impl = pick_for(recipe, x_RD.device, x_RD.shape[0], E, D, width, width // 2)
    groups = read_groups(offsets_E, E, x_RD.shape[0], x_RD.device, impl)
    later = ask(defer, weights)
    settings = _Settings(groups.ends, recipe, impl, caches, later)
    w_up, w_down, anchor = w_gate_up_E2HD, w_down_EDH, None
    if later is not None:
        w_up, w_down = (None if later.has(name) else w for name, w in weights.items())
        anchor = later.anchor
    return _ExpertMLP.apply(x_RD, w_up, w_down, row_weights_R, groups.offsets_E, settings, anchor)


def _check_shapes(
    x_RD: Tensor, w_gate_up_E2HD: Tensor, w_down_EDH: Tensor, row_weights_R: Tensor | None
) -> None:
    operands = {"x_RD": x_RD, "w_gate_up_E2HD": w_gate_up_E2HD, "w_down_EDH": w_down_EDH}
    if row_weights_R is not None:
        operands["row_weights_R"] = row_weights_R
    for name, tensor in operands.items():
        check_source(name, tensor)
        if tensor.device != x_RD.device:
            raise ValueError(
                f"`{name}` must be on the device of `x_RD`, {x_RD.device}, got {tensor.device}."
            )
    if x_RD.ndim != 2 or w_gate_up_E2HD.ndim != 3 or w_gate_up_E2HD.shape[2] != x_RD.shape[1]:
        raise ValueError(
            f"`x_RD` must be (R, D) and `w_gate_up_E2HD` (E, 2H, D), got {tuple(x_RD.shape)} and "
            f"{tuple(w_gate_up_E2HD.shape)}."
        )
    E, width, D = w_gate_up_E2HD.shape
    if width % 2 or tuple(w_down_EDH.shape) != (E, D, width // 2):
        raise ValueError(
            f"`w_down_EDH` must be (E, D, H) for `w_gate_up_E2HD` (E, 2H, D), got "
            f"{tuple(w_down_EDH.shape)} and {tuple(w_gate_up_E2HD.shape)}."
        )
    if row_weights_R is not None and tuple(row_weights_R.shape) != (x_RD.shape[0],):
        raise ValueError(
            f"`row_weights_R` must have one weight a row, {(x_RD.shape[0],)}, got "
            f"{tuple(row_weights_R.shape)}."
        )


def _check_caches(caches: object, weights: dict[str, Tensor], recipe: MXRecipe) -> None:
    if not isinstance(caches, tuple) or len(caches) != len(weights):
        raise TypeError(
            "`caches` must be a pair of `WeightCache`, of `w_gate_up_E2HD` and of `w_down_EDH`, or "
            f"None, got {type(caches).__name__}."
        )
    for cache, (name, w) in zip(caches, weights.items(), strict=True):
        check_is_cache("caches", cache)
        check_cache(cache, name, w, recipe)


class _Settings(NamedTuple):
    ends: list[int] | None
    recipe: MXRecipe
    impl: ProductImpl
    caches: tuple[WeightCache, WeightCache] | None
    later: Later | None

    def weight(self, name: str, given: Tensor | None) -> Tensor:
        """Return a weight that was given as an input, or waits."""
        if given is not None:
            return given
        assert self.later is not None, "a weight is an input or it waits"
        return self.later.weights[name]

    def make(self, name: str, work: Work) -> Tensor | None:
        """Make the gradient of a weight, or leave it for later."""
        if self.later is None or not self.later.has(name):
            return work()
        self.later.leave(name, work)
        return None


class _ExpertMLP(torch.autograd.Function):
    """The equations of this module; weights that wait are no inputs of its graph."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        w_up: Tensor | None,
        w_down: Tensor | None,
        weights_R: Tensor | None,
        offsets_E: Tensor,
        settings: _Settings,
        anchor: Tensor | None,
    ) -> Tensor:
        ends, recipe, impl, caches, _ = settings
        w_up, w_down = settings.weight(_UP, w_up), settings.weight(_DOWN, w_down)
        groups, dtype = Groups(ends, offsets_E), x_RD.dtype
        rows = quantize_rows(x_RD, recipe.element, recipe)
        up = caches[0].forward_operand if caches else quantize_weight(w_up, recipe)
        hidden_R2H = multiply_rows(rows, up, groups, impl, dtype)
        down = caches[1].forward_operand if caches else quantize_weight(w_down, recipe)
        act = _activate(hidden_R2H, weights_R, recipe)
        y_RD = multiply_rows(act, down, groups, impl, dtype)
        kept: tuple[Tensor, Tensor | None] = hidden_R2H, None
        if recipe.saved == "mxfp8":
            hidden = quantize_rows(hidden_R2H, recipe.element, recipe)
            kept = hidden.data, hidden.scales
        ctx.save_for_backward(rows.data, rows.scales, *kept, w_up, w_down, weights_R, offsets_E)
        ctx.settings, ctx.dtype = settings, dtype
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (once_differentiable)
        ctx: Any, dy_RD: Tensor
    ) -> tuple[Tensor | None, ...]:
        settings: _Settings = ctx.settings
        ends, recipe, impl, caches, later = settings
        x_data, x_scales, hidden, hidden_scales, w_up, w_down, weights_R, offsets_E = (
            ctx.saved_tensors
        )
        groups, dtype = Groups(ends, offsets_E), ctx.dtype
        if hidden_scales is not None:
            form = (1, recipe.element, recipe.granularity)
            hidden = dequantize(MXTensor(hidden, hidden_scales, *form), dtype)
        needs_x, needs_up, needs_down, needs_weights, *_ = ctx.needs_input_grad
        if later is not None:
            dy_RD = dy_RD.detach()  # what waits must not keep the graph alive
            needs_up, needs_down = needs_up or later.has(_UP), needs_down or later.has(_DOWN)
        dx_RD = dw_up = dw_down = d_weights_R = None
        if needs_down:
            act = _activate(hidden, weights_R, recipe)
            of_down = (dy_RD, act, groups, recipe, impl, w_down.dtype)
            dw_down = settings.make(_DOWN, partial(weight_gradient, *of_down))
        if needs_x or needs_up or needs_weights:
            quantised = caches and recipe.input_grad == "mxfp8"
            down = caches[1].input_grad_operand if quantised else None
            d_act_RH = input_gradient(dy_RD, w_down, down, groups, recipe, impl, dtype)
            dh, d_weights_R = _hidden_gradient(d_act_RH, hidden, weights_R, recipe)
            if needs_x:
                up = caches[0].input_grad_operand if quantised else None
                dx_RD = input_gradient(dh, w_up, up, groups, recipe, impl, dtype)
            if needs_up:
                rows = MXTensor(x_data, x_scales, 1, recipe.element, recipe.granularity)
                of_up = (dh, rows, groups, recipe, impl, w_up.dtype)
                dw_up = settings.make(_UP, partial(weight_gradient, *of_up))
        if later is not None:
            later.hand_over()
        if d_weights_R is not None:
            d_weights_R = d_weights_R.to(weights_R.dtype) if needs_weights else None
        return dx_RD, dw_up, dw_down, d_weights_R, None, None, None


def _activate(hidden_R2H: Tensor, weights_R: Tensor | None, recipe: MXRecipe) -> MXTensor:
    return swiglu_quantize(
        hidden_R2H,
        row_weights_R=weights_R,
        element=recipe.element,
        scale_rule=recipe.scale_rule,
        granularity=recipe.granularity,
        impl=recipe.quantise_impl,
    )


def _hidden_gradient(
    d_act_RH: Tensor, hidden_R2H: Tensor, weights_R: Tensor | None, recipe: MXRecipe
) -> tuple[MXTensor | Tensor, Tensor | None]:
    if recipe.input_grad == "high":
        dh_R2H, d_weights_R = reference.swiglu_gradients(d_act_RH, hidden_R2H, weights_R)
        return dh_R2H, None if weights_R is None else d_weights_R
    return swiglu_quantize_backward(
        d_act_RH,
        hidden_R2H,
        row_weights_R=weights_R,
        element=recipe.grad_element,
        scale_rule=recipe.scale_rule,
        granularity=recipe.granularity,
        impl=recipe.quantise_impl,
    )
