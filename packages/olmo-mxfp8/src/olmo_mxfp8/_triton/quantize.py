# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""Quantise along the last dimension, along another one, along both from one read, or in tiles.

Shapes: a tensor is seen as (A, L, B), quantised along L; B is 1 for the last dimension.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from olmo_mxfp8._formats import Format

from . import quantize_pairs
from .codes import casts, encode, magnitude_bits, scale_byte
from .quantize_pairs import place

_BLOCK = 32
_TILE = 128
_VALUES = 4096
"""Values a program."""
_COLUMNS = 64
"""Columns a program, so few that one warp holds all of a block and finds its maximum alone."""


def quantize(
    x: Tensor,
    dim: int,
    element: Format,
    *,
    rceil: bool,
    granularity: int,
    weights_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return codes, uint8, and scale bytes, as `reference.quantize_blocks` with repeated scales.

    Args:
        x: Packed, at least one value.
        dim: The dimension along which values share a scale, not negative.
        element: The element format.
        rceil: The rule of the scales.
        granularity: 32, or 128: four blocks share a scale, which is written four times.
        weights_R: Packed, (R,): what rows are multiplied by first, for (R, K) and `dim` 1 alone.
    """
    codes = torch.empty_like(x, dtype=torch.uint8)
    shape = list(x.shape)
    shape[dim] //= _BLOCK
    scales = x.new_empty(shape, dtype=torch.uint8)
    inner = x[(0,) * dim].numel() // x.shape[dim]
    options = {**format_options(element, rceil, x.device), "GROUP": granularity}
    if inner == 1:
        groups = x.numel() // granularity
        each = _VALUES // granularity
        _rows_kernel[(triton.cdiv(groups, each),)](
            x, weights_R, codes, scales, groups, x.shape[dim], GROUPS=each, num_warps=4, **options
        )
    elif quantize_pairs.takes(x, inner):
        rule = {"rceil": rceil, "granularity": granularity}
        quantize_pairs.quantize_columns(x.view(-1, inner), codes, scales, element, **rule)
    else:
        grid = (x.numel() // (granularity * inner) * triton.cdiv(inner, _COLUMNS),)
        warps = granularity // _BLOCK
        _columns_kernel[grid](x, codes, scales, inner, COLUMNS=_COLUMNS, num_warps=warps, **options)
    return codes, scales


def quantize_tiles(x: Tensor, dim: int, element: Format, *, rceil: bool) -> tuple[Tensor, Tensor]:
    """Return codes, uint8, and scale bytes that tiles of 128 x 128 share.

    Args:
        x: Packed, at least one value; the last two dimensions are multiples of 128.
        dim: One of the last two dimensions, not negative: where a byte stands for 32 values.
        element: The element format.
        rceil: The rule of the scales.
    """
    codes = torch.empty_like(x, dtype=torch.uint8)
    shape = list(x.shape)
    shape[dim] //= _BLOCK
    scales = x.new_empty(shape, dtype=torch.uint8)
    K = x.shape[-1]
    grid = (x.numel() // K // _TILE, K // _TILE)
    last = dim == x.ndim - 1
    _tiles_kernel[grid](
        x, codes, scales, K, LAST=last, num_warps=8, **format_options(element, rceil, x.device)
    )
    return codes, scales


def quantize_both(
    x_MK: Tensor, element: Format, *, rceil: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise a packed matrix along its rows and along its columns, reading it once.

    Returns:
        Codes and scales (M, K / 32) along K; codes and scales (M / 32, K) along M.
    """
    M, K = x_MK.shape
    row_codes, column_codes = (torch.empty_like(x_MK, dtype=torch.uint8) for _ in range(2))
    row_scales = x_MK.new_empty(M, K // _BLOCK, dtype=torch.uint8)
    column_scales = x_MK.new_empty(M // _BLOCK, K, dtype=torch.uint8)
    results = (row_codes, row_scales, column_codes, column_scales)
    if quantize_pairs.takes(x_MK, K):
        quantize_pairs.quantize_both(x_MK, *results, element, rceil=rceil)
        return results
    _both_kernel[(M // _BLOCK * triton.cdiv(K, _COLUMNS),)](
        x_MK,
        *results,
        K,
        COLUMNS=_COLUMNS,
        num_warps=1,
        **format_options(element, rceil, x_MK.device),
    )
    return results


def format_options(element: Format, rceil: bool, device: torch.device) -> dict[str, int]:
    """Return what kernels that quantise take by keyword."""
    return {
        "MBITS": element.mantissa_bits,
        "MIN": element.min_exponent,
        "MAX": element.max_exponent,
        "MAX_CODE": element.max_code,
        "RCEIL": rceil,
        "CAST": casts(device),
    }


@triton.jit
def _rows_kernel(
    x,
    weights,
    codes,
    scales,
    groups,
    K,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    MBITS: tl.constexpr,
    MIN: tl.constexpr,
    MAX: tl.constexpr,
    MAX_CODE: tl.constexpr,
    RCEIL: tl.constexpr,
    CAST: tl.constexpr,
):
    """`GROUPS` runs of `GROUP` adjacent values a program, in rows of K times `weights`."""
    first = tl.program_id(0).to(tl.int64) * GROUPS
    group = first + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = (group < groups)[:, None]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if weights is not None:
        weight = tl.load(weights + group * GROUP // K, mask=group < groups, other=0.0)
        value *= weight.to(tl.float32)[:, None]
    byte = scale_byte(tl.max(magnitude_bits(value), 1), MAX, RCEIL)
    tl.store(codes + at, encode(value, byte[:, None], MBITS, MIN, MAX_CODE, CAST), mask=mask)
    BLOCKS: tl.constexpr = GROUP // 32
    block = group[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    tl.store(scales + block, tl.broadcast_to(byte[:, None], block.shape).to(tl.uint8), mask=mask)


@triton.jit
def _columns_kernel(
    x,
    codes,
    scales,
    inner,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    MBITS: tl.constexpr,
    MIN: tl.constexpr,
    MAX: tl.constexpr,
    MAX_CODE: tl.constexpr,
    RCEIL: tl.constexpr,
    CAST: tl.constexpr,
):
    """`GROUP` rows of `inner` values and `COLUMNS` of their columns a program."""
    down, right = place(inner, COLUMNS)
    row = down * GROUP + tl.arange(0, GROUP)
    column = right * COLUMNS + tl.arange(0, COLUMNS)
    at = row[:, None] * inner + column[None, :]
    mask = (column < inner)[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    byte = scale_byte(tl.max(magnitude_bits(value), 0), MAX, RCEIL)[None, :]
    tl.store(codes + at, encode(value, byte, MBITS, MIN, MAX_CODE, CAST), mask=mask)
    BLOCKS: tl.constexpr = GROUP // 32
    block = down * BLOCKS + tl.arange(0, BLOCKS)
    at_scale = block[:, None] * inner + column[None, :]
    tl.store(scales + at_scale, tl.broadcast_to(byte, at_scale.shape).to(tl.uint8), mask=mask)


@triton.jit
def _tiles_kernel(
    x,
    codes,
    scales,
    K,
    LAST: tl.constexpr,
    MBITS: tl.constexpr,
    MIN: tl.constexpr,
    MAX: tl.constexpr,
    MAX_CODE: tl.constexpr,
    RCEIL: tl.constexpr,
    CAST: tl.constexpr,
):
    """One tile of 128 x 128 a program; the scales of a row (LAST) or of a column lie together."""
    row = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    at = row[:, None] * K + column[None, :]
    value = tl.load(x + at).to(tl.float32)
    byte = scale_byte(tl.max(tl.max(magnitude_bits(value), 1), 0), MAX, RCEIL)
    tl.store(codes + at, encode(value, byte, MBITS, MIN, MAX_CODE, CAST))
    block = tl.arange(0, 4)
    if LAST:
        block += tl.program_id(1) * 4
        at_scale = row[:, None] * (K // 32) + block[None, :]
    else:
        block_row = tl.program_id(0).to(tl.int64) * 4 + block
        at_scale = block_row[:, None] * K + column[None, :]
    tl.store(
        scales + at_scale, tl.full(at_scale.shape, 0, tl.int32).to(tl.uint8) + byte.to(tl.uint8)
    )


@triton.jit
def _both_kernel(
    x,
    row_codes,
    row_scales,
    column_codes,
    column_scales,
    K,
    COLUMNS: tl.constexpr,
    MBITS: tl.constexpr,
    MIN: tl.constexpr,
    MAX: tl.constexpr,
    MAX_CODE: tl.constexpr,
    RCEIL: tl.constexpr,
    CAST: tl.constexpr,
):
    """32 rows and `COLUMNS` columns a program."""
    BLOCKS: tl.constexpr = COLUMNS // 32
    down, right = place(K, COLUMNS)
    row = down * 32 + tl.arange(0, 32)
    column = right * COLUMNS + tl.arange(0, COLUMNS)
    at = row[:, None] * K + column[None, :]
    mask = tl.broadcast_to((column < K)[None, :], (32, COLUMNS))
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    bits = magnitude_bits(value)

    byte = scale_byte(tl.max(bits, 0), MAX, RCEIL)
    code = encode(value, byte[None, :], MBITS, MIN, MAX_CODE, CAST)
    tl.store(column_codes + at, code, mask=mask)
    at_scale = down * K + column
    tl.store(column_scales + at_scale, byte.to(tl.uint8), mask=column < K)

    byte = scale_byte(tl.max(tl.reshape(bits, (32, BLOCKS, 32)), 2), MAX, RCEIL)
    spread = tl.reshape(tl.broadcast_to(byte[:, :, None], (32, BLOCKS, 32)), (32, COLUMNS))
    tl.store(row_codes + at, encode(value, spread, MBITS, MIN, MAX_CODE, CAST), mask=mask)
    block = right * BLOCKS + tl.arange(0, BLOCKS)
    at_scale = row[:, None] * (K // 32) + block[None, :]
    keep = tl.broadcast_to((block * 32 < K)[None, :], (32, BLOCKS))
    tl.store(row_scales + at_scale, byte.to(tl.uint8), mask=keep)
