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

_BLOCK = 32
_MAX_BLOCKS = 128
"""Blocks of 32 a program, at most."""


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
    blocks = min(triton.next_power_of_2(K // _BLOCK), _MAX_BLOCKS)
    _dequantize_rows_kernel[(R, triton.cdiv(K // _BLOCK, blocks))](
        codes,
        scales,
        rows_R,
        y,
        T,
        K,
        BLOCKS=blocks,
        MBITS=element.mantissa_bits,
        MIN=element.min_exponent,
        HAS_INFINITY=element.max_code != 0x7E,
        num_warps=max(1, blocks // 32),
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
    T,
    K,
    BLOCKS: tl.constexpr,
    MBITS: tl.constexpr,
    MIN: tl.constexpr,
    HAS_INFINITY: tl.constexpr,
):
    """`BLOCKS` blocks of one row a program. Their scales are read once, not once a value."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    source = tl.load(rows + row).to(tl.int64)
    tl.device_assert(source < T, "`rows_R` must be below the number of rows")
    inside = block < K // 32
    there = inside & (source >= 0) & (source < T)
    byte = tl.load(scales + source * (K // 32) + block, mask=there, other=127)
    column = (block * 32)[:, None] + tl.arange(0, 32)[None, :]
    code = tl.load(codes + source * K + column, mask=there[:, None], other=0)
    value = decode(code.to(tl.int32), byte.to(tl.int32)[:, None], MBITS, MIN, HAS_INFINITY)
    tl.store(y + row * K + column, value.to(y.dtype.element_ty), mask=inside[:, None])
