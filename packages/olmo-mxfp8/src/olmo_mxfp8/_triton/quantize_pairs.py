# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""Quantise bfloat16 along columns, or along rows and columns from one read, two values at a time.

Such kernels hold a block of 32 rows in registers, and with one value a register they run out of
registers and of instructions before they run out of memory bandwidth. Here a register holds two
neighbours in a row, as memory does; all that is done to them is exact, so that the codes and bytes
are those of `quantize`:

- magnitudes are compared as unsigned halves, which order as they do, infinity and then NaN above;
- a value is scaled as bfloat16. A power of two changes its exponent alone; what becomes too small
  for that is far below the smallest element and is 0 either way;
- values of a block that is not finite are cleared, because a cast would turn NaN into a code.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from olmo_mxfp8._formats import Format

from .codes import scale_byte

_PAIRS = 128
"""Pairs a program, across: with two warps for each 32 rows a thread has 64."""


def takes(x: Tensor, inner: int) -> bool:
    """Whether a packed tensor can be quantised along a dimension with `inner` values behind it."""
    return (
        x.dtype == torch.bfloat16
        and inner % 2 == 0
        and x.data_ptr() % 4 == 0
        and x.device.type == "cuda"
        and torch.cuda.get_device_capability(x.device) >= (9, 0)  # of `max.u16x2`
    )


def quantize_columns(
    x_MK: Tensor, codes: Tensor, scales: Tensor, element: Format, *, rceil: bool, granularity: int
) -> None:
    """Write codes, (M, K), and scale bytes, (M / 32, K), of columns of `granularity` rows."""
    M, K = x_MK.shape
    _columns_kernel[(M // granularity * triton.cdiv(K // 2, _PAIRS),)](
        _pairs(x_MK, torch.int32),
        _pairs(codes, torch.uint16),
        _pairs(scales, torch.uint16),
        K // 2,
        GROUP=granularity,
        num_warps=granularity // 16,
        **_options(element, rceil),
    )


def quantize_both(
    x_MK: Tensor,
    row_codes: Tensor,
    row_scales: Tensor,
    column_codes: Tensor,
    column_scales: Tensor,
    element: Format,
    *,
    rceil: bool,
) -> None:
    """Write codes and scales (M, K / 32) along K; codes and scales (M / 32, K) along M."""
    M, K = x_MK.shape
    _both_kernel[(M // 32 * triton.cdiv(K // 2, _PAIRS),)](
        _pairs(x_MK, torch.int32),
        _pairs(row_codes, torch.uint16),
        row_scales,
        _pairs(column_codes, torch.uint16),
        _pairs(column_scales, torch.uint16),
        K // 2,
        num_warps=2,
        **_options(element, rceil),
    )


def _pairs(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.view(-1).view(dtype)


def _options(element: Format, rceil: bool) -> dict[str, int]:
    return {
        "MBITS": element.mantissa_bits,
        "MAX": element.max_exponent,
        "RCEIL": rceil,
        "PAIRS": _PAIRS,
    }


@triton.jit
def _columns_kernel(
    x,
    codes,
    scales,
    K2,
    GROUP: tl.constexpr,
    MBITS: tl.constexpr,
    MAX: tl.constexpr,
    RCEIL: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """`GROUP` rows and `PAIRS` of their pairs of columns a program."""
    BLOCKS: tl.constexpr = GROUP // 32
    down, right = place(K2, PAIRS)
    column = right * PAIRS + tl.arange(0, PAIRS)
    at = tl.arange(0, GROUP)[:, None] * K2 + column[None, :]
    mask = tl.broadcast_to((column < K2)[None, :], at.shape)
    first = down * GROUP * K2
    pairs = tl.load(x + first + at, mask=mask, other=0)
    code, byte = _along_columns(pairs, MBITS, MAX, RCEIL)
    tl.store(codes + first + at, code, mask=mask)
    at = tl.arange(0, BLOCKS)[:, None] * K2 + column[None, :]
    mask = tl.broadcast_to((column < K2)[None, :], at.shape)
    tl.store(scales + down * BLOCKS * K2 + at, tl.broadcast_to(byte[None, :], at.shape), mask=mask)


@triton.jit
def _both_kernel(
    x,
    row_codes,
    row_scales,
    column_codes,
    column_scales,
    K2,
    MBITS: tl.constexpr,
    MAX: tl.constexpr,
    RCEIL: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """32 rows and `PAIRS` of their pairs of columns a program."""
    BLOCKS: tl.constexpr = PAIRS // 16
    down, right = place(K2, PAIRS)
    column = right * PAIRS + tl.arange(0, PAIRS)
    row = tl.arange(0, 32)
    at = row[:, None] * K2 + column[None, :]
    mask = tl.broadcast_to((column < K2)[None, :], at.shape)
    first = down * 32 * K2
    pairs = tl.load(x + first + at, mask=mask, other=0)

    code, byte = _along_columns(pairs, MBITS, MAX, RCEIL)
    tl.store(column_codes + first + at, code, mask=mask)
    tl.store(column_scales + down * K2 + column, byte, mask=column < K2)

    largest = tl.reduce(tl.reshape(pairs & 0x7FFF7FFF, (32, BLOCKS, 16)), 2, _larger)
    byte = scale_byte(tl.maximum(largest << 16, largest & 0x7FFF0000), MAX, RCEIL)
    factor = _over_pairs(_factor(byte) * 0x10001, PAIRS)
    keep = _over_pairs(tl.where(byte == 255, 0, -1), PAIRS)
    tl.store(row_codes + first + at, _encode(pairs, factor, keep, MBITS), mask=mask)
    block = right * BLOCKS + tl.arange(0, BLOCKS)
    at = row[:, None] * (K2 // 16) + block[None, :]
    mask = tl.broadcast_to((block * 16 < K2)[None, :], at.shape)
    tl.store(row_scales + down * 2 * K2 + at, byte.to(tl.uint8), mask=mask)


@triton.jit
def place(width, COLUMNS: tl.constexpr):
    """The block of rows (int64) and of columns of a program.

    Neighbours in a row run at the same time: far apart they would open each page of memory twice.
    """
    across = tl.cdiv(width, COLUMNS)
    return (tl.program_id(0) // across).to(tl.int64), tl.program_id(0) % across


@triton.jit
def _along_columns(pairs, MBITS: tl.constexpr, MAX: tl.constexpr, RCEIL: tl.constexpr):
    """The codes of pairs and the scale bytes of their columns, each two in a uint16."""
    largest = tl.reduce(pairs & 0x7FFF7FFF, 0, _larger)
    low = scale_byte(largest << 16, MAX, RCEIL)
    high = scale_byte(largest & 0x7FFF0000, MAX, RCEIL)
    factor = _factor(low) | (_factor(high) << 16)
    keep = tl.where(low == 255, 0, 0xFFFF) | tl.where(high == 255, 0, -0x10000)
    factor = tl.broadcast_to(factor[None, :], pairs.shape)
    keep = tl.broadcast_to(keep[None, :], pairs.shape)
    return _encode(pairs, factor, keep, MBITS), (low | (high << 8)).to(tl.uint16)


@triton.jit
def _factor(byte):
    """The bits of `2^(127 - byte)` as bfloat16, int32; of byte 255 whatever."""
    return tl.maximum(254 - byte, 0) << 7


@triton.jit
def _over_pairs(of_blocks, PAIRS: tl.constexpr):
    """What belongs to blocks of 16 pairs, for every pair."""
    rows: tl.constexpr = of_blocks.shape[0]
    spread = tl.broadcast_to(of_blocks[:, :, None], (rows, PAIRS // 16, 16))
    return tl.reshape(spread, (rows, PAIRS))


@triton.jit
def _larger(a, b):
    """The larger of two pairs of unsigned 16-bit integers."""
    return tl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _encode(pairs, factor, keep, MBITS: tl.constexpr):
    """The codes of the bits `keep` of pairs, times `factor`: two in a uint16.

    The product is a sum with -0, which changes no value and no sign.
    """
    TO: tl.constexpr = (
        "cvt.rn.satfinite.e4m3x2.f32" if MBITS == 3 else "cvt.rn.satfinite.e5m2x2.f32"
    )
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 v, minus_zero;
        .reg .f32 low, high;
        .reg .b16 first, second;
        mov.b32 minus_zero, 0x80008000;
        and.b32 v, $1, $5;
        fma.rn.bf16x2 v, v, $3, minus_zero;
        shl.b32 low, v, 16;
        and.b32 high, v, 0xffff0000;
        """
        + TO
        + """ first, high, low;
        and.b32 v, $2, $6;
        fma.rn.bf16x2 v, v, $4, minus_zero;
        shl.b32 low, v, 16;
        and.b32 high, v, 0xffff0000;
        """
        + TO
        + """ second, high, low;
        mov.b32 $0, {first, second};
        }""",
        "=r,r,r,r,r,r,r",
        [pairs, factor, keep],
        dtype=tl.uint16,
        is_pure=True,
        pack=2,
    )
