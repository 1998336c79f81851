"""The grouped matrix product: every expert multiplies its own rows by its own weights.

    y[r] = x[r] @ w[e].T        for offsets[e-1] <= r < offsets[e]

This is one linear layer of a mixture of experts once its rows are sorted by expert (the "grouped
GEMM" of MegaBlocks, arXiv:2211.15841, section 5). Its gradients are grouped products again:

    dx[r] = dy[r] @ w[e]        a grouped product with the transposed weights
    dw[e] = dy_e.T @ x_e        a sum over the rows of the expert, (E, F, D)

so two operators, each the derivative of the other, are closed under differentiation of any order.
They are torch operators (`torch.ops.olmo_experts_gemm`), opaque to `torch.compile`.

Shapes: R rows, E experts, D inner width, F outer width.
"""

from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _torch_grouped_mm, _triton_product, reference
from ._checks import check_offsets, check_rows, check_weights, refuse_forward_mode
from ._deferral import Defer, Later, ask, check_defer
from ._main_grad import check_apart, check_main_grad, refuse_second_order_main_grad
from ._packing import refuse_compilation

Impl = Literal["auto", "reference", "torch", "triton"]

_PRODUCTS = {"reference": reference, "torch": _torch_grouped_mm, "triton": _triton_product}


def grouped_mm(
    x_RD: Tensor,
    w_EFD: Tensor,
    offsets_E: Tensor,
    *,
    main_grad_EFD: Tensor | None = None,
    defer: Defer | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Multiply the rows of each expert by its weights, `y = x @ w[e].T`.

    Args:
        x_RD: Rows sorted by expert, (R, D); float16, bfloat16, float32 or float64. R may be 0.
        w_EFD: One weight matrix an expert, (E, F, D), laid out as in `nn.Linear`; the dtype of
            `x_RD`.
        offsets_E: Where the rows of each expert end, (E,) int32 on the device of `x_RD`: a running
            sum of the rows an expert, at most R. Equal neighbours are an expert without rows.
        main_grad_EFD: A contiguous float32 buffer, (E, F, D), to which backward adds the gradient
            of `w_EFD`, if that requires one. `w_EFD` itself then gets no gradient (`None`), and no
            hook on its gradient runs. Every backward through this call adds to it, also one that
            `torch.autograd.grad` runs for another gradient. The buffer may change between forward
            and backward; under `torch.compile` torch raises if it does, unless it was passed as
            `buffer.data`.
        defer: Asked in each call whether the gradient of `w_EFD`, if that is an `nn.Parameter`, may
            be computed later than backward: see `Defer`. What makes it adds to `main_grad_EFD`, if
            that is given, and holds `x_RD` and the gradient of the output until then. Such a call
            is differentiable once. `None`: not asked.
        impl: `"reference"` loops over the experts in plain torch: any dtype and size; on a GPU it
            reads the offsets, so the host waits. `"torch"` is torch's `grouped_mm`: on CPU
            bfloat16, float16 and float32; on CUDA bfloat16 on compute capability 9.x or 10.x, with
            no host sync; D and F multiples of 16 bytes. `"triton"` is the kernels of this package,
            without a host sync: CUDA of compute capability 8.0 or newer, bfloat16 and float16, D
            and F multiples of 8, up to 512 experts, fewer than 2^30 rows; on CPU in Triton's
            interpreter alone, in float16 and float32. Both copy operands that have gaps or are not
            aligned to 16 bytes, and use `w_EFD` as it is when it or `w_EFD.mT` is dense.
            `"auto"` is the first of `"triton"`, `"torch"` and `"reference"` that can run on CUDA,
            and `"reference"` everywhere else.

    Returns:
        `y_RF`, (R, F), of the dtype of `x_RD`. Rows past `offsets_E[-1]` are zero.

    Raises:
        TypeError: A dtype is not one of those above, or `defer` is no function.
        ValueError: Shapes or devices do not match, the offsets are not a running sum within R, the
            named `impl` cannot run here, or `main_grad_EFD` is not a plain contiguous buffer of the
            shape of `w_EFD` and apart from it (backward checks the buffer again). Offsets are
            checked on CPU tensors only, and not in a compiled call. On a GPU, where the check would
            wait for the device, offsets that decrease or pass R fail an assertion on the device by
            `"triton"`, which ends the process's use of the device.
        NotImplementedError: A tensor carries a forward-mode tangent (not seen when compiled), or
            `defer` meets `torch.compile`.
        RuntimeError: In a backward with `create_graph=True`, when `main_grad_EFD` was given.

    Note:
        Differentiable in `x_RD` and `w_EFD`, to any order without `main_grad_EFD`. Rows past
        `offsets_E[-1]`, of `x_RD` and of the incoming gradient alike, are never read: NaN in them
        reaches nothing, and their `dx` is zero. An expert without rows gets a weight gradient of
        exact zeros. `torch.func.grad` raises; `torch.func.vmap` runs one call after another.

        Sums run in float32 (float64 for float64) and are rounded once to the output; float32 on
        CUDA follows torch's TF32 switch. `"triton"` adds an unrounded sum to an aligned
        `main_grad_EFD`. All implementations are deterministic. Saved for backward: `x_RD` and
        `w_EFD`.
    """
    refuse_compilation(defer=defer)
    check_defer(defer)
    check_rows("x_RD", x_RD)
    fits = w_EFD.ndim == 3 and w_EFD.shape[2] == x_RD.shape[1]
    check_weights("w_EFD", w_EFD, "x_RD", x_RD, f"(E, F, D={x_RD.shape[1]})", fits)
    check_offsets(offsets_E, w_EFD.shape[0], "x_RD", x_RD)
    check_main_grad("main_grad_EFD", main_grad_EFD, "w_EFD", w_EFD)
    check_apart("main_grad_EFD", main_grad_EFD, {"w_EFD": w_EFD})
    refuse_forward_mode(x_RD, w_EFD)
    chosen = pick(impl, x_RD, x_RD.shape[0], *w_EFD.shape)
    return multiply(x_RD, w_EFD, offsets_E, main_grad_EFD, chosen, defer)


def check_impl(impl: str) -> None:
    """The name is known."""
    if impl not in get_args(Impl):
        raise ValueError(f"`impl` must be 'auto', 'reference', 'torch' or 'triton', got {impl!r}.")


def pick(impl: Impl, x: Tensor, num_rows: int, num_experts: int, *widths: int) -> Impl:
    """Name the implementation that multiplies `num_rows` rows, or raise when the named one cannot.

    Args:
        impl: What the caller asks for.
        x: Where and in which dtype the products run.
        num_rows: R.
        num_experts: E.
        *widths: Every matrix width of the products.
    """
    check_impl(impl)
    if impl == "reference" or (impl == "auto" and x.device.type != "cuda"):
        return "reference"
    if impl in ("auto", "triton"):
        reason = _triton_product.why_not(x, num_rows, num_experts, *widths)
        if not reason:
            return "triton"
        if impl == "triton":
            raise ValueError(
                f"`impl='triton'` cannot run: {reason}; use impl='auto', 'torch' or 'reference'."
            )
    reason = _torch_grouped_mm.why_not(x, num_experts, *widths)
    if reason and impl == "torch":
        raise ValueError(
            f"`impl='torch'` cannot run: torch's grouped_mm was asked, and {reason}; "
            "use impl='reference' or impl='auto'."
        )
    return "reference" if reason else "torch"


def multiply(
    x_RD: Tensor,
    w_EFD: Tensor,
    offsets_E: Tensor,
    main_grad_EFD: Tensor | None,
    impl: str,
    defer: Defer | None,
) -> Tensor:
    """`grouped_mm` without checks, of a chosen implementation."""
    later = ask(defer, {"w_EFD": w_EFD})
    if later is not None:
        return _Waiting.apply(later.anchor, x_RD, offsets_E, main_grad_EFD, impl, later)
    if main_grad_EFD is None:
        return grouped_mm_op(x_RD, w_EFD, offsets_E, impl)
    return grouped_mm_main_grad_op(x_RD, w_EFD, offsets_E, main_grad_EFD, impl)


@torch.library.custom_op("olmo_experts_gemm::grouped_mm", mutates_args=())
def grouped_mm_op(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor, impl: str) -> Tensor:
    """`y = x @ w[e].T`, (R, F)."""
    return _PRODUCTS[impl].grouped_mm(x_RD, w_EFD, offsets_E)


@torch.library.custom_op("olmo_experts_gemm::grouped_outer", mutates_args=())
def grouped_outer_op(dy_RF: Tensor, x_RD: Tensor, offsets_E: Tensor, impl: str) -> Tensor:
    """`dw[e] = dy_e.T @ x_e`, (E, F, D)."""
    return _PRODUCTS[impl].grouped_outer(dy_RF, x_RD, offsets_E)


@torch.library.custom_op("olmo_experts_gemm::grouped_mm_main_grad", mutates_args=())
def grouped_mm_main_grad_op(
    x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor, main_grad_EFD: Tensor, impl: str
) -> Tensor:
    """`grouped_mm` whose backward adds the gradient of the weights to a buffer."""
    return _PRODUCTS[impl].grouped_mm(x_RD, w_EFD, offsets_E)


@torch.library.custom_op("olmo_experts_gemm::add_grouped_outer", mutates_args=("into_EFD",))
def add_grouped_outer_op(
    into_EFD: Tensor, dy_RF: Tensor, x_RD: Tensor, offsets_E: Tensor, impl: str
) -> None:
    """`into[e] += dy_e.T @ x_e`."""
    if impl == "triton":
        _triton_product.add_grouped_outer(into_EFD, dy_RF, x_RD, offsets_E)
    else:
        into_EFD.add_(_PRODUCTS[impl].grouped_outer(dy_RF, x_RD, offsets_E))


@grouped_mm_op.register_fake
def _(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor, impl: str) -> Tensor:
    return x_RD.new_empty(x_RD.shape[0], w_EFD.shape[1])


@grouped_outer_op.register_fake
def _(dy_RF: Tensor, x_RD: Tensor, offsets_E: Tensor, impl: str) -> Tensor:
    return dy_RF.new_empty(offsets_E.shape[0], dy_RF.shape[1], x_RD.shape[1])


@grouped_mm_main_grad_op.register_fake
def _(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor, main_grad: Tensor, impl: str) -> Tensor:
    return x_RD.new_empty(x_RD.shape[0], w_EFD.shape[1])


@add_grouped_outer_op.register_fake
def _(into_EFD: Tensor, dy_RF: Tensor, x_RD: Tensor, offsets_E: Tensor, impl: str) -> None:
    return None


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, second, offsets_E, ctx.impl = inputs
    ctx.save_for_backward(first, second, offsets_E)


def _grouped_mm_backward(ctx: Any, dy_RF: Tensor) -> tuple[Tensor | None, ...]:
    x_RD, w_EFD, offsets_E = ctx.saved_tensors
    needs_dx, needs_dw, *_ = ctx.needs_input_grad
    dx_RD = grouped_mm_op(dy_RF, w_EFD.mT, offsets_E, ctx.impl) if needs_dx else None
    dw_EFD = grouped_outer_op(dy_RF, x_RD, offsets_E, ctx.impl) if needs_dw else None
    return dx_RD, dw_EFD, None, None


def _grouped_outer_backward(ctx: Any, g_EFD: Tensor) -> tuple[Tensor | None, ...]:
    dy_RF, x_RD, offsets_E = ctx.saved_tensors
    needs_dy, needs_x, *_ = ctx.needs_input_grad
    g_dy_RF = grouped_mm_op(x_RD, g_EFD, offsets_E, ctx.impl) if needs_dy else None
    g_x_RD = grouped_mm_op(dy_RF, g_EFD.mT, offsets_E, ctx.impl) if needs_x else None
    return g_dy_RF, g_x_RD, None, None


def _save_main_grad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # Not saved as an input: the buffer may change before backward, and backward wants it changed.
    x_RD, w_EFD, offsets_E, ctx.main_grad_EFD, ctx.impl = inputs
    ctx.save_for_backward(x_RD, w_EFD, offsets_E)


def _main_grad_backward(ctx: Any, dy_RF: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_order_main_grad()
    x_RD, w_EFD, offsets_E = ctx.saved_tensors
    needs_dx, needs_dw, *_ = ctx.needs_input_grad
    dx_RD = grouped_mm_op(dy_RF, w_EFD.mT, offsets_E, ctx.impl) if needs_dx else None
    if needs_dw:
        check_main_grad("main_grad_EFD", ctx.main_grad_EFD, "w_EFD", w_EFD)
        add_grouped_outer_op(ctx.main_grad_EFD, dy_RF, x_RD, offsets_E, ctx.impl)
    return dx_RD, None, None, None, None


class _Waiting(torch.autograd.Function):
    """`grouped_mm` whose weight gradient is left for later; the weight is no input of its graph."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x_RD: Tensor,
        offsets_E: Tensor,
        main_grad_EFD: Tensor | None,
        impl: str,
        later: Later,
    ) -> Tensor:
        w_EFD = later.weights["w_EFD"]
        ctx.save_for_backward(x_RD, w_EFD, offsets_E)
        ctx.main_grad_EFD, ctx.impl, ctx.later = main_grad_EFD, impl, later
        return grouped_mm_op(x_RD, w_EFD, offsets_E, impl)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (once_differentiable)
        ctx: Any, dy_RF: Tensor
    ) -> tuple[Tensor | None, ...]:
        x_RD, w_EFD, offsets_E = ctx.saved_tensors
        needs_dx = ctx.needs_input_grad[1]
        check_main_grad("main_grad_EFD", ctx.main_grad_EFD, "w_EFD", w_EFD)
        dx_RD = grouped_mm_op(dy_RF, w_EFD.mT, offsets_E, ctx.impl) if needs_dx else None
        rows = (dy_RF.detach(), x_RD.detach(), offsets_E, ctx.impl)  # detached: without the graph
        if ctx.main_grad_EFD is None:
            make = partial(grouped_outer_op, *rows)
        else:
            make = partial(add_grouped_outer_op, ctx.main_grad_EFD, *rows)
        ctx.later.leave("w_EFD", make)
        ctx.later.hand_over()
        return None, dx_RD, None, None, None, None


grouped_mm_op.register_autograd(_grouped_mm_backward, setup_context=_save)
grouped_outer_op.register_autograd(_grouped_outer_backward, setup_context=_save)
grouped_mm_main_grad_op.register_autograd(_main_grad_backward, setup_context=_save_main_grad)
