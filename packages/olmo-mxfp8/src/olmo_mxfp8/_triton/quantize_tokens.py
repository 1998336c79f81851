# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""Quantise along the tokens of each expert, transposed: the operands of `token_product`.

Hopper's FP8 units take both operands with the contraction adjacent in memory, and the weight
gradient contracts over tokens. So the rows of each expert are cut into blocks of 128, the last one
filled up with zeros, and the codes of a block lie side by side for every column. Block j of expert
e, whose rows begin at `start`, has the place

    start // 128 + e + j

among `R // 128 + E`: it needs no sum over experts, and no two blocks share a place, because n rows
take `start // 128` up by at least `ceil(n / 128) - 1`. What lies at other places is never written.

Shapes: R rows, E experts, D columns, P places of blocks, T = 128 P.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from olmo_mxfp8._formats import Format

from .codes import decode, encode, magnitude_bits, scale_byte, scale_value
from .quantize import format_options
from .tile_list import list_tiles

BLOCK = 128  # tokens that share a scale
_COLUMNS = 64  # columns a program


def num_places(num_rows: int, num_experts: int) -> int:
    """Return P."""
    return num_rows // BLOCK + num_experts


def quantize_tokens(
    x_RD: Tensor,
    scales: Tensor | None,
    source: Format | None,
    offsets_E: Tensor,
    element: Format,
    *,
    rceil: bool,
) -> tuple[Tensor, Tensor]:
    """Quantise ordinary values, or codes along D under their scales, along the rows of an expert.

    Args:
        x_RD: Packed, (R, D), D a multiple of 32: float32, bfloat16 or float16, or uint8 codes. Rows
            past the last offset may hold anything.
        scales: Packed, uint8, (R, D / 32), where `x_RD` holds codes.
        source: Their element format.
        offsets_E: Ends of the experts' rows, (E,) int32.
        element: The element format to quantise to.
        rceil: The rule of the scales.

    Returns:
        Codes, uint8, (D, T), and scales (P, D), one for each 128 tokens: the power of two itself in
        float32, which a product would else make of a byte in every step of every tile.
    """
    (R, D), E = x_RD.shape, offsets_E.numel()
    places = num_places(R, E)
    codes = x_RD.new_empty(D, BLOCK * places, dtype=torch.uint8)
    scales_PD = x_RD.new_empty(places, D, dtype=torch.float32)
    tiles, capacity = list_tiles(offsets_E, R, BLOCK)
    given = {"S_MBITS": 0, "S_MIN": 0, "S_INFINITY": False}
    if source is not None:
        endless = source.dtype == torch.float8_e5m2
        given = {"S_MBITS": source.mantissa_bits, "S_MIN": source.min_exponent}
        given["S_INFINITY"] = endless
    _quantize_tokens_kernel[(capacity, triton.cdiv(D, _COLUMNS))](
        x_RD,
        scales,
        codes,
        scales_PD,
        offsets_E,
        tiles,
        capacity,
        R,
        D,
        codes.shape[1],
        CODES=source is not None,
        BLOCK=BLOCK,
        COLUMNS=_COLUMNS,
        num_warps=4,
        **given,
        **format_options(element, rceil, x_RD.device),
    )
    return codes, scales_PD


@triton.jit
def _quantize_tokens_kernel(
    x,
    x_scales,
    codes,
    scales,
    offsets,
    tiles,
    capacity,
    R,
    D,
    T,
    CODES: tl.constexpr,
    S_MBITS: tl.constexpr,
    S_MIN: tl.constexpr,
    S_INFINITY: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    MBITS: tl.constexpr,
    MIN: tl.constexpr,
    MAX: tl.constexpr,
    MAX_CODE: tl.constexpr,
    RCEIL: tl.constexpr,
    CAST: tl.constexpr,
):
    """Quantise `COLUMNS` columns of one listed block; the list may be shorter than the grid."""
    if tl.program_id(0) < tl.load(tiles + 2 * capacity):
        expert = tl.load(tiles + tl.program_id(0))
        row = tl.load(tiles + capacity + tl.program_id(0))
        end = tl.minimum(tl.load(offsets + expert), R)
        start = tl.maximum(tl.load(offsets + expert - 1, mask=expert > 0, other=0), 0)
        start = tl.minimum(start, row)
        place = (start // BLOCK + expert + (row - start) // BLOCK).to(tl.int64)
        token = row + tl.arange(0, BLOCK)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (token < end)[:, None] & (column < D)[None, :]
        at = token.to(tl.int64)[:, None] * D + column[None, :]
        if CODES:
            BLOCKS: tl.constexpr = COLUMNS // 32
            block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
            known = (token < end)[:, None] & (block < D // 32)[None, :]
            at_scale = token.to(tl.int64)[:, None] * (D // 32) + block[None, :]
            byte = tl.load(x_scales + at_scale, mask=known, other=127).to(tl.int32)
            byte = tl.broadcast_to(byte[:, :, None], (BLOCK, BLOCKS, 32))
            code = tl.load(x + at, mask=inside, other=0).to(tl.int32)
            value = decode(code, tl.reshape(byte, (BLOCK, COLUMNS)), S_MBITS, S_MIN, S_INFINITY)
        else:
            value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        byte = scale_byte(tl.max(magnitude_bits(value), 0), MAX, RCEIL)
        tl.store(scales + place * D + column, scale_value(byte), mask=column < D)
        code = encode(value, byte[None, :], MBITS, MIN, MAX_CODE, CAST)
        to = column.to(tl.int64)[:, None] * T + place * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(codes + to, tl.trans(code), mask=(column < D)[:, None])
