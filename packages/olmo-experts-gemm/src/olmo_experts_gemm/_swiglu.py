"""The expert MLP: a SwiGLU feed-forward network an expert, on rows sorted by expert.

    [gate, up] = x @ w_gate_up[e].T
    f(x)       = (silu(gate) * up) @ w_down[e].T
    y[r]       = row_weight[r] * f(x[r])

SwiGLU: Shazeer, arXiv:2002.05202, equation 6. The row weight is the combine weight of the route
that brought the row, so that collecting a token's rows afterwards is a pure sum.

Shapes: R rows, E experts, D model width, H expert hidden width.
"""

from typing import Protocol

import torch
from torch import Tensor

from ._checks import FLOATS, check_device, check_experts, check_offsets, check_rows, name_of
from ._grouped_mm import Impl, grouped_mm_op, pick


class GroupedMatmul(Protocol):
    """A product that can take the place of `grouped_mm`, such as a quantised one.

    `matmul(x_RD, w_EFD, offsets_E) -> y_RF`, `y = x @ w[e].T` for the rows of expert `e`,
    differentiable in `x_RD` and `w_EFD`, the dtype of `x_RD` in and out. What it returns for rows
    past `offsets_E[-1]`, and as their gradient, is ignored; it is given zeros there.
    """

    def __call__(self, x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor, /) -> Tensor:
        """Return `y_RF`."""
        ...


def swiglu_experts(
    x_RD: Tensor,
    w_gate_up_E2HD: Tensor,
    w_down_EDH: Tensor,
    offsets_E: Tensor,
    *,
    row_weights_R: Tensor | None = None,
    impl: Impl = "auto",
    matmul: GroupedMatmul | None = None,
) -> Tensor:
    """Run the SwiGLU MLP of each expert on its rows, and scale each row by its weight.

    Args:
        x_RD: Rows sorted by expert, (R, D); float16, bfloat16, float32 or float64. R may be 0.
        w_gate_up_E2HD: Gate rows first, then up rows, (E, 2H, D); the dtype of `x_RD`.
        w_down_EDH: (E, D, H); the dtype of `x_RD`.
        offsets_E: Where the rows of each expert end, (E,) int32, as for `grouped_mm`.
        row_weights_R: A factor a row of the output, (R,), any float dtype; `None` means 1. A row
            of weight 0 is 0 wherever its `f(x)` is finite.
        impl: Which product, as for `grouped_mm`; one choice serves both products.
        matmul: A product to use in place of `grouped_mm`; leave `impl` at `"auto"` with it.

    Returns:
        `y_RD`, (R, D), of the dtype of `x_RD`. Rows past `offsets_E[-1]` are zero.

    Raises:
        TypeError: A dtype is not one of those above.
        ValueError: Shapes or devices do not match, the offsets are not a running sum within R (seen
            on CPU tensors only), `impl` cannot run here or comes together with `matmul`, or
            `matmul` returns another shape or dtype.

    Note:
        Differentiable in the rows, both weights and the row weights. Rows past `offsets_E[-1]` and
        their row weights and incoming gradients are never read; their gradients are zero. The
        activation runs in the dtype of `x_RD`; a row weight of a wider dtype multiplies in that
        dtype, and its gradient `<dy[r], f(x[r])>` is summed in it.

        Held for backward beyond the inputs, a row: `4 H` elements, and `D` more with row weights.
    """
    check_rows("x_RD", x_RD)
    E, D, H = check_experts(w_gate_up_E2HD, w_down_EDH, "x_RD", x_RD)
    check_offsets(offsets_E, E, "x_RD", x_RD)
    if row_weights_R is not None:
        _check_row_weights(row_weights_R, x_RD)
    check_one_product(impl, matmul)

    if matmul is None:
        chosen = pick(impl, x_RD, E, D, H)
        hidden_R2H = grouped_mm_op(x_RD, w_gate_up_E2HD, offsets_E, chosen)
        y_RD = grouped_mm_op(_swiglu(hidden_R2H), w_down_EDH, offsets_E, chosen)
    else:
        hidden_R2H = _guarded(matmul, x_RD, w_gate_up_E2HD, offsets_E)
        y_RD = _guarded(matmul, _swiglu(hidden_R2H), w_down_EDH, offsets_E)
    if row_weights_R is None:
        return y_RD
    weights_R1 = _zero_tail(row_weights_R[:, None], offsets_E)
    return (y_RD * weights_R1).to(y_RD.dtype)


def check_one_product(impl: Impl, matmul: GroupedMatmul | None) -> None:
    """`matmul` leaves nothing for `impl` to choose."""
    if matmul is not None and impl != "auto":
        raise ValueError(
            f"`impl` must stay 'auto' when `matmul` is given, got impl={impl!r}; pass one of them."
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


def _swiglu(hidden_R2H: Tensor) -> Tensor:
    gate_RH, up_RH = hidden_R2H.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_RH) * up_RH


def _zero_tail(rows: Tensor, offsets_E: Tensor) -> Tensor:
    """Put zeros past the last offset, in the value and in the gradient, without reading there."""
    rows_R = torch.arange(rows.shape[0], device=rows.device)
    return torch.where((rows_R < offsets_E[-1])[:, None], rows, 0)


def _guarded(matmul: GroupedMatmul, x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """Keep what lies past the last offset away from a product of the caller, both ways."""
    y_RF = matmul(_zero_tail(x_RD, offsets_E), w_EFD, offsets_E)
    shape = (x_RD.shape[0], w_EFD.shape[1])
    if y_RF.shape != shape or y_RF.dtype != x_RD.dtype:
        raise ValueError(
            f"`matmul` must return {name_of(x_RD.dtype)} of shape {shape}, "
            f"got {name_of(y_RF.dtype)} of shape {tuple(y_RF.shape)}."
        )
    return _zero_tail(y_RF, offsets_E)
