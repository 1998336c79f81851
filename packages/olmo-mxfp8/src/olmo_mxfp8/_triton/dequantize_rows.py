# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""The values of chosen rows, gathered and dequantised in one pass.

Shapes: T rows there are, R rows that are chosen, K columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from olmo_mxfp8._formats import Format

from .codes import decode

_VALUES = 4096
"""Values a program."""


def dequantize_rows(
    codes: Tensor, scales: Tensor, rows_R: Tensor, element: Format, dtype: torch.dtype
) -> Tensor:
    """Return the values of `rows_R`, (R, K), `dtype`; zeros where it is -1.

    Args:
        codes: Packed, (T, K), uint8, quantised along K.
        scales: Packed, (T, K / 32), uint8.
        rows_R: Packed, (R,), int32 or int64. One past T fails an assertion on the device.
        element: The element format.
        dtype: Of the values.
    """
    (T, K), R = codes.shape, rows_R.numel()
    y = codes.new_empty(R, K, dtype=dtype)
    columns = min(K & -K, _VALUES // 2)  # divides K, so that no program has columns to spare
    height = _VALUES // columns
    _dequantize_rows_kernel[(triton.cdiv(R, height), triton.cdiv(K, columns))](
        codes,
        scales,
        rows_R,
        y,
        R,
        T,
        K,
        ROWS=height,
        COLUMNS=columns,
        MBITS=element.mantissa_bits,
        MIN=element.min_exponent,
        HAS_INFINITY=element.max_code != 0x7E,
        num_warps=8,
        debug=True,  # or the assertion is compiled away
        sanitize_overflow=False,
    )
    return y


@triton.jit
def _dequantize_rows_kernel(
    codes,
    scales,
    rows,
    y,
    R,
    T,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MBITS: tl.constexpr,
    MIN: tl.constexpr,
    HAS_INFINITY: tl.constexpr,
):
    """`ROWS` rows of the result and `COLUMNS` of their columns a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    source = tl.load(rows + row, mask=row < R, other=-1).to(tl.int64)
    tl.device_assert(source < T, "`rows_R` must be below the number of rows")
    there = ((source >= 0) & (source < T))[:, None] & (column < K)[None, :]
    code = tl.load(codes + source[:, None] * K + column[None, :], mask=there, other=0)
    at_scale = source[:, None] * (K // 32) + (column // 32)[None, :]
    byte = tl.load(scales + at_scale, mask=there, other=127)
    value = decode(code.to(tl.int32), byte.to(tl.int32), MBITS, MIN, HAS_INFINITY)
    at = row[:, None] * K + column[None, :]
    mask = (row < R)[:, None] & (column < K)[None, :]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)
