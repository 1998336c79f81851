# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""Scale bytes and element codes, the same on every device.

Where the hardware casts to FP8 (CAST), to nearest even and saturating, it does; elsewhere integer
arithmetic gives the same bits. The formulas are those of `reference.py`; MBITS, MIN and MAX are the
mantissa bits and the least and largest exponent of the element format, and both formats have their
largest number at 1.75 * 2^MAX.
"""

from functools import cache

import torch
import triton
import triton.language as tl


@cache
def casts(device: torch.device) -> bool:
    """Whether the device has instructions that cast to both FP8 formats: from 8.9 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def scale_byte(amax, MAX: tl.constexpr, RCEIL: tl.constexpr):
    """The scale byte, int32, for the bits of a block's largest magnitude; 255 if not finite."""
    byte = (amax >> 23) - MAX
    if RCEIL:
        byte += ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.where(amax >= 0x7F800000, 255, tl.maximum(byte, 0))


@triton.jit
def scale_value(byte):
    """`2^(byte - 127)`: byte 0 is a subnormal, byte 255 is NaN."""
    ends = (byte == 0) | (byte == 255)
    bits = (byte << 23) | tl.where(ends, 0x400000, 0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode(
    x,
    byte,
    MBITS: tl.constexpr,
    MIN: tl.constexpr,
    MAX_CODE: tl.constexpr,
    CAST: tl.constexpr,
):
    """The codes of `x / 2^(byte - 127)`, uint8: to nearest even, saturating; 0 for byte 255."""
    # The reciprocal of a scale is the scale of 254 - byte; no byte is above 247 but for 255.
    scaled = x * scale_value(tl.maximum(254 - byte, 0))
    code = _cast(scaled, MBITS) if CAST else _round(scaled, MBITS, MIN, MAX_CODE)
    return tl.where(byte == 255, 0, code).to(tl.uint8)


@triton.jit
def _cast(scaled, MBITS: tl.constexpr):
    """By the instruction of the device."""
    if MBITS == 3:
        return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
def _round(scaled, MBITS: tl.constexpr, MIN: tl.constexpr, MAX_CODE: tl.constexpr):
    """By integer arithmetic, int32."""
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    DROPPED: tl.constexpr = 23 - MBITS
    rounded = magnitude + ((magnitude >> DROPPED) & 1) + ((1 << (DROPPED - 1)) - 1)
    normal = (rounded >> DROPPED) - ((MIN - 1 + 127) << MBITS)
    # The sum with an anchor, whose last place is the smallest element, rounds to it.
    ANCHOR: tl.constexpr = (MIN + DROPPED + 127) << 23
    anchor = tl.full(magnitude.shape, ANCHOR, tl.int32).to(tl.float32, bitcast=True)
    total = magnitude.to(tl.float32, bitcast=True) + anchor
    small = total.to(tl.int32, bitcast=True) - ANCHOR
    code = tl.where(magnitude < ((MIN + 127) << 23), small, normal)
    return tl.minimum(code, MAX_CODE) | ((bits >> 24) & 0x80)


@triton.jit
def decode(code, byte, MBITS: tl.constexpr, MIN: tl.constexpr, HAS_INFINITY: tl.constexpr):
    """The values of codes under their scale bytes, float32; both int32."""
    magnitude = code & 0x7F
    # As the top bits of a float32 the code is its value but for the bias of the exponent, also
    # where both are subnormal; the product that mends the bias is exact.
    BIAS: tl.constexpr = 1 - MIN
    bits = (magnitude << (23 - MBITS)) | ((code & 0x80) << 24)
    mend = tl.full(code.shape, (254 - BIAS) << 23, tl.int32).to(tl.float32, bitcast=True)
    value = bits.to(tl.float32, bitcast=True) * mend
    if HAS_INFINITY:
        endless = ((code & 0x80) << 24) | 0x7F800000
        value = tl.where(magnitude == 0x7C, endless.to(tl.float32, bitcast=True), value)
        value = tl.where(magnitude > 0x7C, float("nan"), value)
    else:
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    return value * scale_value(byte)


@triton.jit
def magnitude_bits(x):
    """The bits of |x|, which order as |x| does, infinity and then NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
