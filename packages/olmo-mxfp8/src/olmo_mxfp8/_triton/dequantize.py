# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""The values of codes under their scale bytes.

Shapes: a tensor is seen as (A, L, B), quantised along L; B is 1 for the last dimension.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from olmo_mxfp8._formats import Format

from .codes import decode

_BLOCK = 32
_VALUES = 4096


def dequantize(
    codes: Tensor, scales: Tensor, dim: int, element: Format, dtype: torch.dtype
) -> Tensor:
    """Return the values, `dtype`, packed; codes and scales are packed uint8, not empty."""
    y = codes.new_empty(codes.shape, dtype=dtype)
    inner = codes[(0,) * dim].numel() // codes.shape[dim]
    _dequantize_kernel[(triton.cdiv(codes.numel(), _VALUES),)](
        codes,
        scales,
        y,
        codes.numel(),
        inner,
        VALUES=_VALUES,
        LAST=inner == 1,
        MBITS=element.mantissa_bits,
        MIN=element.min_exponent,
        HAS_INFINITY=element.max_code != 0x7E,
        num_warps=8,
    )
    return y


@triton.jit
def _dequantize_kernel(
    codes,
    scales,
    y,
    size,
    inner,
    VALUES: tl.constexpr,
    LAST: tl.constexpr,
    MBITS: tl.constexpr,
    MIN: tl.constexpr,
    HAS_INFINITY: tl.constexpr,
):
    """`VALUES` adjacent values a program."""
    at = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    mask = at < size
    code = tl.load(codes + at, mask=mask, other=0).to(tl.int32)
    at_scale = at // 32 if LAST else at // inner // 32 * inner + at % inner
    byte = tl.load(scales + at_scale, mask=mask, other=0).to(tl.int32)
    value = decode(code, byte, MBITS, MIN, HAS_INFINITY)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)
