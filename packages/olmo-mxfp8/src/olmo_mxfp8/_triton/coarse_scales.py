# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""The scales of a coarse operand, one of those that are equal, as float32.

A product loads them as they are, and four bytes at a time can be on their way while it multiplies.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codes import scale_value

_BLOCK = 1024


def coarse_scales(scales: Tensor, down: int, across: int) -> Tensor:
    """Return `2^(byte - 127)` of every `down`-th row and `across`-th column, packed float32.

    Args:
        scales: uint8, (I, J), of any strides.
        down: A divisor of I.
        across: A divisor of J.
    """
    I, J = scales.shape[0] // down, scales.shape[1] // across
    values = torch.empty(I, J, dtype=torch.float32, device=scales.device)
    _coarse_scales_kernel[(triton.cdiv(I * J, _BLOCK),)](
        scales,
        values,
        I * J,
        J,
        scales.stride(0) * down,
        scales.stride(1) * across,
        BLOCK=_BLOCK,
    )
    return values


@triton.jit
def _coarse_scales_kernel(scales, values, size, J, down, across, BLOCK: tl.constexpr):
    """`BLOCK` values a program."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = (at // J).to(tl.int64) * down + (at % J).to(tl.int64) * across
    byte = tl.load(scales + source, mask=at < size, other=0).to(tl.int32)
    tl.store(values + at, scale_value(byte), mask=at < size)
