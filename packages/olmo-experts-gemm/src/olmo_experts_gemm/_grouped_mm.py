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

from typing import Any, Literal

import torch
from torch import Tensor

from . import _torch_grouped_mm, reference
from ._checks import check_offsets, check_rows, check_weights

Impl = Literal["auto", "reference", "torch"]

_PRODUCTS = {"reference": reference, "torch": _torch_grouped_mm}


def grouped_mm(
    x_RD: Tensor,
    w_EFD: Tensor,
    offsets_E: Tensor,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Multiply the rows of each expert by its weights, `y = x @ w[e].T`.

    Args:
        x_RD: Rows sorted by expert, (R, D); float16, bfloat16, float32 or float64. R may be 0.
        w_EFD: One weight matrix an expert, (E, F, D), laid out as in `nn.Linear`; the dtype of
            `x_RD`.
        offsets_E: Where the rows of each expert end, (E,) int32 on the device of `x_RD`: a running
            sum of the rows an expert, at most R. Equal neighbours are an expert without rows.
        impl: `"reference"` loops over the experts in plain torch: any dtype and size; on a GPU it
            reads the offsets, so the host waits. `"torch"` is torch's `grouped_mm`: on CPU
            bfloat16, float16 and float32; on CUDA bfloat16 on compute capability 9.x or 10.x, with
            no host sync; D and F multiples of 16 bytes; operands in another layout are copied.
            `"auto"` is `"torch"` on CUDA where it can run and `"reference"` everywhere else (on
            CPU the two take the same time).

    Returns:
        `y_RF`, (R, F), of the dtype of `x_RD`. Rows past `offsets_E[-1]` are zero.

    Raises:
        TypeError: A dtype is not one of those above.
        ValueError: Shapes or devices do not match, the offsets are not a running sum within R (seen
            on CPU tensors only), or the named `impl` cannot run here.

    Note:
        Differentiable in `x_RD` and `w_EFD`. Rows past `offsets_E[-1]`, of `x_RD` and of the
        incoming gradient alike, are never read: NaN in them reaches nothing, and their `dx` is
        zero. An expert without rows gets a weight gradient of exact zeros.

        Sums run in float32 (float64 for float64) and are rounded once to the output; float32 on
        CUDA follows torch's TF32 switch. Both implementations are deterministic. Saved for
        backward: `x_RD` and `w_EFD`.
    """
    check_rows("x_RD", x_RD)
    fits = w_EFD.ndim == 3 and w_EFD.shape[2] == x_RD.shape[1]
    check_weights("w_EFD", w_EFD, "x_RD", x_RD, f"(E, F, D={x_RD.shape[1]})", fits)
    check_offsets(offsets_E, w_EFD.shape[0], "x_RD", x_RD)
    return grouped_mm_op(x_RD, w_EFD, offsets_E, pick(impl, x_RD, *w_EFD.shape))


def pick(impl: Impl, x_RD: Tensor, num_experts: int, *widths: int) -> Impl:
    """Name the implementation that multiplies, or raise when the named one cannot."""
    if impl not in ("auto", *_PRODUCTS):
        raise ValueError(f"`impl` must be 'auto', 'reference' or 'torch', got {impl!r}.")
    if impl == "reference" or (impl == "auto" and x_RD.device.type != "cuda"):
        return "reference"
    reason = _torch_grouped_mm.why_not(x_RD, num_experts, *widths)
    if reason and impl == "torch":
        raise ValueError(
            f"`impl='torch'` cannot run: torch's grouped_mm was asked, and {reason}; "
            "use impl='reference' or impl='auto'."
        )
    return "reference" if reason else "torch"


@torch.library.custom_op("olmo_experts_gemm::grouped_mm", mutates_args=())
def grouped_mm_op(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor, impl: str) -> Tensor:
    """`grouped_mm` without checks, of a chosen implementation."""
    return _PRODUCTS[impl].grouped_mm(x_RD, w_EFD, offsets_E)


@torch.library.custom_op("olmo_experts_gemm::grouped_outer", mutates_args=())
def grouped_outer_op(dy_RF: Tensor, x_RD: Tensor, offsets_E: Tensor, impl: str) -> Tensor:
    """`dw[e] = dy_e.T @ x_e`, (E, F, D)."""
    return _PRODUCTS[impl].grouped_outer(dy_RF, x_RD, offsets_E)


@grouped_mm_op.register_fake
def _(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor, impl: str) -> Tensor:
    return x_RD.new_empty(x_RD.shape[0], w_EFD.shape[1])


@grouped_outer_op.register_fake
def _(dy_RF: Tensor, x_RD: Tensor, offsets_E: Tensor, impl: str) -> Tensor:
    return dy_RF.new_empty(offsets_E.shape[0], dy_RF.shape[1], x_RD.shape[1])


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


grouped_mm_op.register_autograd(_grouped_mm_backward, setup_context=_save)
grouped_outer_op.register_autograd(_grouped_outer_backward, setup_context=_save)
