"""Products of two MXFP8 operands.

    scaled_mm:          y_mn = sum_k a_mk b_nk
    scaled_grouped_mm:  the same for the rows of each expert, with that expert's `b`

An element times its scale has at most four significant bits, so a product of two is exact in
float32 and the sum, also in float32, is the only rounding before the last one to `out_dtype`. The
reference form multiplies the dequantised operands, the numbers that scaled matrix units multiply.

Shapes: M, R rows, N output features, K contraction, E experts.
Source: OCP Microscaling Formats (MX) Specification 1.0, section 6.2 (the dot product).
"""

from collections.abc import Sequence

import torch

from . import reference
from ._quantize import dequantize
from ._tensor import MXTensor
from ._uncompiled import uncompiled


def scaled_mm(a: MXTensor, b: MXTensor, *, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return `a @ b.T`, accumulated in float32.

    Args:
        a: `(M, K)`, quantised along K.
        b: `(N, K)`, quantised along K, laid out as in `nn.Linear`; its element format may differ.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        `out_dtype`, `(M, N)`.

    Raises:
        TypeError: `out_dtype` is another one.
        ValueError: The shapes, dimensions or devices do not fit.
    """
    _check_operands(a, b, b_ndim=2)
    _check_out_dtype(out_dtype)
    b_as_stack = MXTensor(b.data.unsqueeze(0), b.scales.unsqueeze(0), 2, b.element)
    return grouped_product(a, b_as_stack, [a.shape[0]], a.shape[0], out_dtype)


@uncompiled(reason="the reference form reads `offsets_E` on the host")
def scaled_grouped_mm(
    a: MXTensor,
    b: MXTensor,
    offsets_E: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Return `a @ b[e].T` for the rows of each expert `e`, accumulated in float32.

    Expert `e` has the rows from `offsets_E[e - 1]` (0 for the first) to `offsets_E[e]`, possibly
    none. Rows past `offsets_E[-1]` are not read, whatever they hold, and are 0 in the output.

    Args:
        a: `(R, K)`, quantised along K.
        b: `(E, N, K)`, quantised along K; its element format may differ.
        offsets_E: int32, `(E,)`, the inclusive ends of each expert's rows, ascending, at most R.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        `out_dtype`, `(R, N)`.

    Raises:
        TypeError: `offsets_E` or `out_dtype` has another dtype.
        ValueError: The shapes, dimensions, devices or offsets do not fit.

    Note:
        The reference form reads `offsets_E` on the host; `torch.compile` breaks its graph here.
    """
    _check_operands(a, b, b_ndim=3)
    _check_out_dtype(out_dtype)
    ends = read_offsets(offsets_E, b.shape[0], a.shape[0], a.device)
    used = MXTensor(a.data[: ends[-1]], a.scales[: ends[-1]], a.dim, a.element)
    return grouped_product(used, b, ends, a.shape[0], out_dtype)


def grouped_product(
    a: MXTensor, b: MXTensor, ends: Sequence[int], num_rows: int, out_dtype: torch.dtype
) -> torch.Tensor:
    """Multiply operands that are known to fit; `a` has only rows of experts, the result more."""
    out = reference.grouped_product(dequantize(a), dequantize(b), ends, num_rows)
    # Fresh, also in float32: `torch.compile` gives a gradient of 0 to a result written by `out=`.
    return out.to(out_dtype, copy=True)


def read_offsets(
    offsets_E: torch.Tensor, num_experts: int, num_rows: int, device: torch.device
) -> list[int]:
    """Return the offsets as integers, or raise what `scaled_grouped_mm` documents."""
    if offsets_E.dtype != torch.int32:
        raise TypeError(f"`offsets_E` must be int32, got {offsets_E.dtype}; call `.int()` on it.")
    if tuple(offsets_E.shape) != (num_experts,) or num_experts == 0:
        raise ValueError(
            f"`offsets_E` must have one end for each of at least one expert, ({num_experts},), "
            f"got {tuple(offsets_E.shape)}."
        )
    if offsets_E.device != device:
        raise ValueError(
            f"`offsets_E` must be on the device of the rows, {device}, got {offsets_E.device}."
        )
    ends = offsets_E.tolist()
    if ends != sorted(ends) or ends[0] < 0 or ends[-1] > num_rows:
        raise ValueError(
            f"`offsets_E` must ascend from at least 0 to at most the number of rows, {num_rows}; "
            f"it does not. Pass the running sum of the rows of each expert."
        )
    return ends


def _check_operands(a: MXTensor, b: MXTensor, b_ndim: int) -> None:
    if a.data.ndim != 2 or b.data.ndim != b_ndim:
        expected = "(N, K)" if b_ndim == 2 else "(E, N, K)"
        raise ValueError(
            f"`a` must be (M, K) and `b` {expected}, got {tuple(a.shape)} and {tuple(b.shape)}."
        )
    for name, operand in (("a", a), ("b", b)):
        if operand.dim != operand.data.ndim - 1:
            raise ValueError(
                f"`{name}` must be quantised along its last dimension, the contraction, got `dim`="
                f"{operand.dim} of {tuple(operand.shape)}; quantise the transposed tensor instead."
            )
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"`a` and `b` must have the same last dimension, got {tuple(a.shape)} and "
            f"{tuple(b.shape)}; `b` is stored as (.., out, in)."
        )
    if a.device != b.device:
        raise ValueError(f"`a` and `b` must be on one device, got {a.device} and {b.device}.")


def _check_out_dtype(out_dtype: torch.dtype) -> None:
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"`out_dtype` must be bfloat16, float16 or float32, got {out_dtype}.")
