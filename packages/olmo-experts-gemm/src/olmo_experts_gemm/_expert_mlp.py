"""The expert MLP: a gated feed-forward network an expert, on rows sorted by expert.

    [gate, up] = x @ w_gate_up[e].T + b_gate_up[e]
    f(x)       = (silu(gate) * up) @ w_down[e].T + b_down[e]
    y[r]       = row_weight[r] * f(x[r])

SwiGLU: Shazeer, arXiv:2002.05202, equation 6; `_activation` has the others. The row weight is the
combine weight of the route that brought the row, so that collecting a token's rows afterwards is a
pure sum.

Shapes: R rows, E experts, D model width, H expert hidden width.
"""

from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ._activation import Activation, activate, check_activation, has_gate
from ._checks import (
    FLOATS,
    check_bias,
    check_device,
    check_experts,
    check_offsets,
    check_rows,
    name_of,
    refuse_forward_mode,
)
from ._deferral import Defer, ask, check_defer
from ._fused_mlp import WEIGHTS, expert_mlp_op, expert_mlp_that_waits, saves_hidden
from ._grouped_mm import Impl, check_impl, grouped_mm_op, multiply, pick
from ._main_grad import check_apart, check_main_grad, main_grad_pair
from ._packing import SavedActivationPacker, packing, place_of, refuse_compilation


class GroupedMatmul(Protocol):
    """A product that can take the place of `grouped_mm`, such as a quantised one.

    `matmul(x_RD, w_EFD, offsets_E) -> y_RF`, `y = x @ w[e].T` for the rows of expert `e`,
    differentiable in `x_RD` and `w_EFD`, the dtype of `x_RD` in and out. What it returns for rows
    past `offsets_E[-1]`, and as their gradient, is ignored; it is given zeros there.
    """

    def __call__(self, x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor, /) -> Tensor:
        """Return `y_RF`."""
        ...


class Stacks(NamedTuple):
    """The parameters of an expert MLP, and the buffers of its weight gradients."""

    w_gate_up: Tensor
    w_down: Tensor
    b_gate_up: Tensor | None
    b_down: Tensor | None
    main_gate_up: Tensor | None
    main_down: Tensor | None

    @staticmethod
    def of(
        w_gate_up: Tensor,
        w_down: Tensor,
        b_gate_up: Tensor | None,
        b_down: Tensor | None,
        main_grads: tuple[Tensor, Tensor] | None,
    ) -> "Stacks":
        """From the arguments of a public function."""
        return Stacks(w_gate_up, w_down, b_gate_up, b_down, *main_grad_pair(main_grads))


def swiglu_experts(
    x_RD: Tensor,
    w_gate_up_E2HD: Tensor,
    w_down_EDH: Tensor,
    offsets_E: Tensor,
    *,
    row_weights_R: Tensor | None = None,
    activation: Activation = "swiglu",
    b_gate_up_E2H: Tensor | None = None,
    b_down_ED: Tensor | None = None,
    main_grads: tuple[Tensor, Tensor] | None = None,
    pack: SavedActivationPacker | None = None,
    defer: Defer | None = None,
    impl: Impl = "auto",
    matmul: GroupedMatmul | None = None,
) -> Tensor:
    """Run the MLP of each expert on its rows, and scale each row by its weight.

    Args:
        x_RD: Rows sorted by expert, (R, D); float16, bfloat16, float32 or float64. R may be 0.
        w_gate_up_E2HD: Gate rows first, then up rows, (E, 2H, D); (E, H, D) for `"relu_squared"`,
            which has no gate; the dtype of `x_RD`.
        w_down_EDH: (E, D, H); the dtype of `x_RD`.
        offsets_E: Where the rows of each expert end, (E,) int32, as for `grouped_mm`.
        row_weights_R: A factor a row of the output, (R,), any float dtype; `None` means 1. A row
            of weight 0 is 0 wherever its `f(x)` is finite. `"triton"` converts it to float32,
            float64 too.
        activation: `"swiglu"`; `"geglu"`, with the exact gelu; `"relu_squared"`, without a gate; or
            `"clamped_swiglu"`, that of gpt-oss: `g sigmoid(1.702 g) (u + 1)` of `g = min(gate, 7)`
            and `u` = up within -7 and 7.
        b_gate_up_E2H: Added to the first product, (E, 2H), or (E, H) without a gate; the dtype of
            the stacks.
        b_down_ED: Added to the second product before the row weight, (E, D).
        main_grads: Two contiguous float32 buffers of the shapes of the stacks, to which backward
            adds their gradients, as `main_grad_EFD` of `grouped_mm`; both, apart from each other.
            The biases have none.
        pack: Keeps `x_RD` and the pre-activations for backward in a form of its own; no other
            tensor is given to it, and none twice. What is saved besides must not be changed in
            place before backward, which raises then, as ever. Its hooks take the place of
            saved-tensor hooks around this call for all that is saved here.
        defer: Asked in each call whether the gradients of the stacks, and by `"triton"` of the
            biases, may be computed later than backward, where they are `nn.Parameter`: see `Defer`.
            Then what makes them adds to `main_grads`, if given, with the bits of one backward. Such
            a call is differentiable once. `None`: not asked.
        impl: Which product, as for `grouped_mm`; one choice serves both products. `"triton"` is the
            fused MLP, which is differentiable once.
        matmul: A product to use in place of `grouped_mm`; leave `impl` at `"auto"`, and
            `main_grads`, `pack` and `defer` at `None`, with it.

    Returns:
        `y_RD`, (R, D), of the dtype of `x_RD`. Rows past `offsets_E[-1]` are zero.

    Raises:
        TypeError: A dtype is not one of those above, or `defer` is no function.
        ValueError: Shapes or devices do not match, `activation` is unknown, the offsets are not a
            running sum within R (seen as by `grouped_mm`), `impl` cannot run here, `matmul` comes
            together with `impl`, `main_grads`, `pack` or `defer`, a buffer of `main_grads` is not
            as `grouped_mm` wants it or shares memory with the other, or `matmul` or `pack.unpack`
            returns another shape, dtype or device.
        NotImplementedError: A tensor carries a forward-mode tangent (not seen when compiled), or
            `pack` or `defer` meets `torch.compile`.
        RuntimeError: A second derivative through `"triton"`, `create_graph=True` with `main_grads`,
            or a backward with `pack` after a saved tensor was changed in place.

    Note:
        Differentiable in the rows, both weights, both biases and the row weights, once by
        `"triton"` and to any order by the others; `torch.func.grad` raises. Rows past
        `offsets_E[-1]` and their row weights and incoming gradients are never read; their gradients
        are zero. `"reference"` and `"torch"` run the activation in the dtype of `x_RD`, and a row
        weight of a wider dtype multiplies in that dtype, and its gradient `<dy[r], f(x[r])>` is
        summed in it. `"triton"` does all of that in float32, and rounds the weighted hidden layer
        before the second product: in float16 values of it below 6e-5 are subnormal and lose bits.

        Held for backward beyond the inputs, a row, for the SwiGLU in 16 bits: `4 H` bytes by
        `"triton"`, and 4 for a row weight that is not float32; by the others `8 H` bytes, and `2 D`
        more with row weights. The rows are an input: `2 D` bytes each, unless they are packed.

        Held from backward until deferred gradients are computed, a row: the rows as they are and
        the gradient of the output, `4 D` bytes, and `6 H` for the SwiGLU in 16 bits (the gradient
        of the pre-activations, and the hidden layer).
    """
    refuse_compilation(pack, defer)
    check_defer(defer)
    check_one_product(impl, matmul, main_grads=main_grads, pack=pack, defer=defer)
    check_rows("x_RD", x_RD)
    stacks = Stacks.of(w_gate_up_E2HD, w_down_EDH, b_gate_up_E2H, b_down_ED, main_grads)
    E, D, H = check_stacks(stacks, activation, "x_RD", x_RD)
    check_offsets(offsets_E, E, "x_RD", x_RD)
    if row_weights_R is not None:
        _check_row_weights(row_weights_R, x_RD)
    refuse_forward_mode(x_RD, row_weights_R, *stacks)
    chosen = pick(impl, x_RD, x_RD.shape[0], E, D, H)
    if chosen == "triton" and matmul is None:
        maps = (offsets_E, None, None)
        return run_fused(x_RD, stacks, row_weights_R, maps, 1, activation, pack, defer)
    return run_products(
        x_RD, stacks, row_weights_R, offsets_E, activation, pack, defer, chosen, matmul
    )


def check_stacks(stacks: Stacks, activation: str, x_name: str, x: Tensor) -> tuple[int, int, int]:
    """Everything that belongs to the experts fits; return E, D and H."""
    check_activation(activation)
    w_gate_up, w_down, b_gate_up, b_down, main_gate_up, main_down = stacks
    sizes = check_experts(w_gate_up, w_down, has_gate(activation), x_name, x)
    check_bias("b_gate_up_E2H", b_gate_up, "w_gate_up_E2HD", w_gate_up)
    check_bias("b_down_ED", b_down, "w_down_EDH", w_down)
    check_main_grad("main_grads[0]", main_gate_up, "w_gate_up_E2HD", w_gate_up)
    check_main_grad("main_grads[1]", main_down, "w_down_EDH", w_down)
    weights = {"w_gate_up_E2HD": w_gate_up, "w_down_EDH": w_down}
    check_apart("main_grads[0]", main_gate_up, {**weights, "main_grads[1]": main_down})
    check_apart("main_grads[1]", main_down, weights)
    return sizes


def check_one_product(impl: Impl, matmul: GroupedMatmul | None, **others: object) -> None:
    """`matmul` leaves nothing for `impl` to choose, and keeps its own gradients and tensors."""
    check_impl(impl)
    if matmul is None:
        return
    if impl != "auto":
        raise ValueError(
            f"`impl` must stay 'auto' when `matmul` is given, got impl={impl!r}; pass one of them."
        )
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"`{name}` must stay None when `matmul` is given, got both; what `matmul` saves, "
                "and where its gradients go, is its own affair."
            )


def _check_row_weights(row_weights_R: Tensor, x_RD: Tensor) -> None:
    if row_weights_R.dtype not in FLOATS:
        raise TypeError(f"`row_weights_R` must be floats, got {name_of(row_weights_R.dtype)}.")
    check_device("row_weights_R", row_weights_R, "x_RD", x_RD)
    if row_weights_R.shape != x_RD.shape[:1]:
        raise ValueError(
            f"`row_weights_R` must have shape ({x_RD.shape[0]},), one weight a row of `x_RD`, "
            f"got {tuple(row_weights_R.shape)}."
        )


def run_fused(
    x: Tensor,
    stacks: Stacks,
    weights: Tensor | None,
    maps: tuple[Tensor, Tensor | None, Tensor | None],
    top_k: int,
    activation: str,
    pack: SavedActivationPacker | None,
    defer: Defer | None,
) -> Tensor:
    """Run the fused kernels on tokens (with their maps) or on rows, without checks."""
    if weights is not None:
        weights = weights.float()
    inputs = (x, *stacks[:4], weights)
    arguments = (*inputs, *stacks[4:], *maps, top_k, activation, saves_hidden(inputs))
    call = expert_mlp_op
    later = None if defer is None else ask(defer, dict(zip(WEIGHTS, stacks[:4], strict=True)))
    if later is not None:
        call = partial(expert_mlp_that_waits, later)
    if pack is None:
        return call(*arguments)[0]
    # Of the floats that the operator saves, all but these are `x` and the pre-activations.
    others = {place_of(t) for t in (*stacks[:4], weights) if t is not None}
    with packing(pack, lambda t: t.is_floating_point() and place_of(t) not in others):
        return call(*arguments)[0]


def run_products(
    x_RD: Tensor,
    stacks: Stacks,
    row_weights_R: Tensor | None,
    offsets_E: Tensor,
    activation: str,
    pack: SavedActivationPacker | None,
    defer: Defer | None,
    impl: Impl,
    matmul: GroupedMatmul | None,
) -> Tensor:
    """Run two products and plain torch between them, without checks."""

    def product(rows: Tensor, w: Tensor, bias: Tensor | None, main_grad: Tensor | None) -> Tensor:
        if matmul is None:
            y = multiply(rows, w, offsets_E, main_grad, impl, defer)
        else:
            y = _guarded(matmul, rows, w, offsets_E)
        return y if bias is None else y + _bias_rows(bias, offsets_E, len(rows), impl)

    activations = {place_of(x_RD)} if pack is not None else set()
    with packing(pack, lambda t: place_of(t) in activations):
        hidden = product(x_RD, stacks.w_gate_up, stacks.b_gate_up, stacks.main_gate_up)
        if pack is not None:
            activations.update(place_of(t) for t in (hidden, *hidden.chunk(2, dim=-1)))
        a_RH = activate(hidden, activation)
        y_RD = product(a_RH, stacks.w_down, stacks.b_down, stacks.main_down)
        if row_weights_R is None:
            return y_RD
        weights_R1 = _zero_tail(row_weights_R[:, None], offsets_E)
        return (y_RD * weights_R1).to(y_RD.dtype)


def _bias_rows(bias_EF: Tensor, offsets_E: Tensor, num_rows: int, impl: Impl) -> Tensor:
    """The bias of each row's expert, (R, F), and zeros past the last offset.

    A product with rows of `(1, 0, ...)`: exact, and its gradient is a sum without atomics.
    """
    width = 8  # what every implementation can multiply
    ones = bias_EF.new_zeros(num_rows, width)
    ones[:, 0] = 1
    stack = torch.nn.functional.pad(bias_EF[:, :, None], (0, width - 1))
    return grouped_mm_op(ones, stack, offsets_E, impl)


def _zero_tail(rows: Tensor, offsets_E: Tensor) -> Tensor:
    """Put zeros past the last offset, in the value and in the gradient, without reading there."""
    rows_R = torch.arange(rows.shape[0], device=rows.device)
    return torch.where((rows_R < offsets_E[-1])[:, None], rows, 0)


def _guarded(matmul: GroupedMatmul, x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """Keep what lies past the last offset away from a product of the caller, both ways."""
    y_RF = matmul(_zero_tail(x_RD, offsets_E), w_EFD, offsets_E)
    if not isinstance(y_RF, Tensor):
        raise TypeError(f"`matmul` must return a tensor, got {type(y_RF).__name__}.")
    shape = (x_RD.shape[0], w_EFD.shape[1])
    if y_RF.shape != shape or y_RF.dtype != x_RD.dtype:
        raise ValueError(
            f"`matmul` must return {name_of(x_RD.dtype)} of shape {shape}, "
            f"got {name_of(y_RF.dtype)} of shape {tuple(y_RF.shape)}."
        )
    return _zero_tail(y_RF, offsets_E)
