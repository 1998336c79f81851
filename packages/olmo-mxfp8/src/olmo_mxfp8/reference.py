"""The definition of correct, in plain torch: MX encode, decode and grouped products.

For a block of values `v_i` with a scale `X = 2^(b - 127)` of byte `b` and with elements `P_i`

    encode:  b from the largest |v_i|;   P_i = round_to_nearest_even(v_i / X), saturating
    decode:  v_i = X * P_i

Every step is exact or rounds once. The scale byte comes from the exponent and mantissa bits of the
FP32 maximum, because a logarithm in floating point misses bytes near a power of two. The elements
are rounded on the bits too, because casts to FP8 differ between torch versions and devices (some
saturate, some overflow). `v_i / X` is a product with another power of two and cannot round, except
below the FP32 normals, where the element is zero anyway.

Shapes: the blocked dimension of a tensor is split in two, `(.., blocks, size, ..)`, where `dim` is
the index of `blocks`. R rows, E experts, N output features, K contraction.
Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.1 to 6.3; the `rceil` rule is
that of NVIDIA's MXFP8 pre-training recipe (arXiv 2506.08027, section 3).
"""

from collections.abc import Sequence

import torch

from ._formats import COARSE, Format, ScaleRule

SIGN = 0x80  # of an element
MAGNITUDE = 0x7FFFFFFF  # an FP32 number without its sign
INFINITY = 0x7F800000
MANTISSA_BITS = 23
BIAS = 127
NOT_A_NUMBER = 255  # the scale byte


def scale_bytes(amax: torch.Tensor, element: Format, rule: ScaleRule) -> torch.Tensor:
    """Return the scale byte of each block.

    `floor`: the largest power of two in `amax`, over the largest in the element format; values
    between 1.75 and 2 times a power of two then saturate. `rceil`: the smallest scale with which
    `amax` fits, one higher exactly when the mantissa of `amax` exceeds 1.75.

    Args:
        amax: int32, any shape, the bits of each block's largest FP32 magnitude.
        element: The element format.
        rule: How the scale is rounded.

    Returns:
        int32, the shape of `amax`, in `[0, 247]`, or 255 where `amax` is infinite or NaN.
    """
    byte = (amax >> MANTISSA_BITS) - element.max_exponent
    if rule == "rceil":
        byte += (amax & 0x7FFFFF) > 0x600000
    return byte.clamp_min(0).masked_fill(amax >= INFINITY, NOT_A_NUMBER)


def decode_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return `2^(b - 127)` in float32, and NaN for byte 255.

    `b << 23` is that number except at both ends, and the same bit mends both: byte 0 is the
    subnormal 2^-127, byte 255 is NaN and not infinity.
    """
    ends = (scales == 0) | (scales == NOT_A_NUMBER)
    return (scales.int() << MANTISSA_BITS | ends.int() << 22).view(torch.float32)


def encode(x: torch.Tensor, element: Format) -> torch.Tensor:
    """Round FP32 numbers to element codes: to nearest, ties to even, saturating at the largest.

    Args:
        x: float32, any shape, finite or infinite. NaN has no place here: its block's scale says it.
        element: The element format.

    Returns:
        uint8 codes, the shape of `x`.
    """
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE
    is_normal = magnitude >= ((element.min_exponent + BIAS) << MANTISSA_BITS)
    dropped = MANTISSA_BITS - element.mantissa_bits
    # Normal: add half a step, less one bit when the last kept bit is 0, and cut; a carry runs on
    # into the exponent, which then moves to the bias of the element. In place, as memory is slow.
    code = magnitude >> dropped
    code &= 1
    code += magnitude
    code += (1 << (dropped - 1)) - 1
    code >>= dropped
    code -= (element.min_exponent - 1 + BIAS) << element.mantissa_bits
    # Subnormal: the sum with an anchor, whose last place is the smallest element, rounds to it.
    anchor = element.min_exponent + dropped
    sums = magnitude.view(torch.float32).add_(2.0**anchor)
    subnormal = sums.view(torch.int32).sub_((anchor + BIAS) << MANTISSA_BITS)
    torch.where(is_normal, code, subnormal, out=code)
    code.clamp_max_(element.max_code)
    sign = torch.bitwise_right_shift(bits, 24, out=subnormal)
    sign &= SIGN
    code |= sign
    return code.to(torch.uint8)


def quantize_blocks(
    blocks: torch.Tensor, dim: int, element: Format, rule: ScaleRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise blocks that lie along `dim + 1`.

    Args:
        blocks: float32, `(.., blocks, size, ..)`, contiguous.
        dim: The index of `blocks`.
        element: The element format.
        rule: How the scale is rounded.

    Returns:
        Codes, uint8, the shape of `blocks`, and scale bytes, uint8, without the dimension of
        `size`. A block that holds a NaN or an infinity has scale 255 and codes 0.
    """
    amax = (blocks.view(torch.int32) & MAGNITUDE).amax(dim + 1)  # NaN above infinity above the rest
    scales = scale_bytes(amax, element, rule)
    lost = (scales == NOT_A_NUMBER).unsqueeze(dim + 1)
    # The reciprocal of byte b is byte 254 - b, exactly; it is never subnormal, as b is at most 247.
    reciprocal = decode_scales((2 * BIAS - scales).clamp_min(0)).unsqueeze(dim + 1)
    codes = encode(blocks * reciprocal, element).mul_(~lost)
    return codes, scales.to(torch.uint8)


def quantize_tiles(
    x: torch.Tensor, element: Format, rule: ScaleRule, size: int = COARSE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise tiles of `size` x `size` of the last two dimensions.

    Args:
        x: float32, `(.., M, K)`, both multiples of `size`.
        element: The element format.
        rule: How the scale is rounded.
        size: Height and width of a tile.

    Returns:
        Codes, uint8, the shape of `x`, contiguous, and scale bytes, uint8, one a tile,
        `(.., M / size, K / size)`.
    """
    *_, M, K = x.shape
    split = x.unflatten(-1, (K // size, size)).unflatten(-3, (M // size, size))
    tiles = split.transpose(-2, -3).contiguous()  # (.., M tile, K tile, row, column)
    codes, scales = quantize_blocks(tiles.flatten(-2), tiles.ndim - 3, element, rule)
    return codes.view(tiles.shape).transpose(-2, -3).reshape(x.shape), scales


def swiglu(hidden_R2H: torch.Tensor, weights_R: torch.Tensor | None) -> torch.Tensor:
    """Return `w silu(gate) up` of rows `[gate, up]`, `(R, H)`, in float32."""
    gate_RH, up_RH = hidden_R2H.float().chunk(2, dim=-1)
    act_RH = gate_RH * torch.sigmoid(gate_RH) * up_RH
    return act_RH if weights_R is None else weights_R[:, None] * act_RH


def swiglu_gradients(
    d_act_RH: torch.Tensor, hidden_R2H: torch.Tensor, weights_R: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `hidden`, `(R, 2H)`, and of `weights`, `(R,)`, in float32."""
    gate_RH, up_RH = hidden_R2H.float().chunk(2, dim=-1)
    d_act_RH = d_act_RH.float()
    sigmoid_RH = torch.sigmoid(gate_RH)
    silu_RH = gate_RH * sigmoid_RH
    d_weights_R = (d_act_RH * silu_RH * up_RH).sum(-1)
    if weights_R is not None:
        d_act_RH = d_act_RH * weights_R[:, None]
    d_gate_RH = d_act_RH * up_RH * (sigmoid_RH + silu_RH * (1 - sigmoid_RH))
    return torch.cat([d_gate_RH, d_act_RH * silu_RH], dim=-1), d_weights_R


def dequantize_blocks(
    blocks: torch.Tensor, scales: torch.Tensor, dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return `X * P` of blocks that lie along `dim + 1`.

    A product has at most four significant bits and is exact, unless it is 2^128 or more in float32:
    then it is infinite. A NaN or infinite element keeps its value unless the scale is NaN.

    Args:
        blocks: An element dtype, `(.., blocks, 32, ..)`.
        scales: uint8, without the dimension of 32.
        dim: The index of `blocks`.
        dtype: float32 or float64, of the arithmetic and the result.

    Returns:
        The shape of `blocks`.
    """
    # A table of all 256 codes: torch's own cast of a large tensor is several times slower on a CPU.
    table = torch.arange(256, device=blocks.device, dtype=torch.uint8).view(blocks.dtype).to(dtype)
    codes = blocks.reshape(-1).view(torch.uint8).int()
    elements = table.index_select(0, codes).view(blocks.shape)
    return elements.mul_(decode_scales(scales).to(dtype).unsqueeze(dim + 1))


def grouped_product(
    a_RK: torch.Tensor, b_ENK: torch.Tensor, ends: Sequence[int], num_rows: int
) -> torch.Tensor:
    """Return `a @ b[e].T` for the rows of each expert `e`, with zero rows up to `num_rows`.

    Autocast, which would round the operands, leaves a product with `out=` alone; so below.
    """
    out_RN = a_RK.new_empty(num_rows, b_ENK.shape[1])
    start = 0
    for b_NK, end in zip(b_ENK, ends, strict=True):
        torch.mm(a_RK[start:end], b_NK.T, out=out_RN[start:end])
        start = end
    out_RN[start:] = 0
    return out_RN


def grouped_outer_product(
    a_RN: torch.Tensor, b_RK: torch.Tensor, ends: Sequence[int]
) -> torch.Tensor:
    """Return `a.T @ b` over the rows of each expert, `(E, N, K)`; an expert without rows has 0."""
    out_ENK = a_RN.new_empty(len(ends), a_RN.shape[1], b_RK.shape[1])
    start = 0
    for out_NK, end in zip(out_ENK, ends, strict=True):
        torch.mm(a_RN[start:end].T, b_RK[start:end], out=out_NK)
        start = end
    return out_ENK
