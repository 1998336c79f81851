# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""SwiGLU and its gradient, quantised as they are computed: memory is read and written once.

Shapes: R rows, H hidden width; the rows are `[gate, up]`, 2H wide.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from olmo_mxfp8._formats import Format

from .codes import encode, magnitude_bits, scale_byte
from .quantize import format_options

_BLOCK = 32
_VALUES = 2048
"""Values of a half a program."""


def swiglu_quantize(
    hidden_R2H: Tensor, weights_R: Tensor | None, element: Format, *, rceil: bool, granularity: int
) -> tuple[Tensor, Tensor]:
    """Return codes (R, H), uint8, and scale bytes of `w silu(gate) up` along H.

    Args:
        hidden_R2H: Packed, at least one value; H is a multiple of `granularity`.
        weights_R: Packed, (R,), or None.
        element: The element format.
        rceil: The rule of the scales.
        granularity: 32, or 128: four blocks share a scale, which is written four times.
    """
    R, H = hidden_R2H.shape[0], hidden_R2H.shape[1] // 2
    codes = hidden_R2H.new_empty(R, H, dtype=torch.uint8)
    scales = hidden_R2H.new_empty(R, H // _BLOCK, dtype=torch.uint8)
    each = _VALUES // granularity
    _swiglu_quantize_kernel[(triton.cdiv(codes.numel(), _VALUES),)](
        hidden_R2H,
        weights_R,
        codes,
        scales,
        codes.numel() // granularity,
        H,
        GROUP=granularity,
        GROUPS=each,
        num_warps=4,
        **format_options(element, rceil, hidden_R2H.device),
    )
    return codes, scales


def swiglu_quantize_backward(
    d_act_RH: Tensor,
    hidden_R2H: Tensor,
    weights_R: Tensor | None,
    element: Format,
    *,
    rceil: bool,
    granularity: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (R, 2H), uint8, and scale bytes of the gradient of `hidden` along 2H.

    Args:
        d_act_RH: Packed, the gradient of `w silu(gate) up`.
        hidden_R2H: As for `swiglu_quantize`.
        weights_R: As there.
        element: As there.
        rceil: As there.
        granularity: As there.

    Returns:
        Codes, scales, and parts of the gradient of `weights_R`, float32 (R, H / granularity), to be
        summed over the last dimension.
    """
    R, H = d_act_RH.shape
    codes = d_act_RH.new_empty(R, 2 * H, dtype=torch.uint8)
    scales = d_act_RH.new_empty(R, 2 * H // _BLOCK, dtype=torch.uint8)
    parts = d_act_RH.new_empty(R, H // granularity, dtype=torch.float32)
    each = _VALUES // granularity
    _swiglu_quantize_backward_kernel[(triton.cdiv(d_act_RH.numel(), _VALUES),)](
        d_act_RH,
        hidden_R2H,
        weights_R,
        codes,
        scales,
        parts,
        d_act_RH.numel() // granularity,
        H,
        GROUP=granularity,
        GROUPS=each,
        num_warps=4,
        **format_options(element, rceil, hidden_R2H.device),
    )
    return codes, scales, parts


@triton.jit
def _store(
    value,
    codes,
    scales,
    at,
    mask,
    GROUP: tl.constexpr,
    MBITS: tl.constexpr,
    MIN: tl.constexpr,
    MAX: tl.constexpr,
    MAX_CODE: tl.constexpr,
    RCEIL: tl.constexpr,
    CAST: tl.constexpr,
):
    """Quantise runs (GROUPS, GROUP) and store them at `at`, the place of each run's first value."""
    byte = scale_byte(tl.max(magnitude_bits(value), 1), MAX, RCEIL)[:, None]
    inside = tl.arange(0, GROUP)[None, :]
    code = encode(value, byte, MBITS, MIN, MAX_CODE, CAST)
    tl.store(codes + at[:, None] + inside, code, mask=mask[:, None])
    block = (at // 32)[:, None] + tl.arange(0, GROUP // 32)[None, :]
    tl.store(scales + block, tl.broadcast_to(byte, block.shape).to(tl.uint8), mask=mask[:, None])


@triton.jit
def _swiglu_quantize_kernel(
    hidden,
    weights,
    codes,
    scales,
    groups,
    H,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    MBITS: tl.constexpr,
    MIN: tl.constexpr,
    MAX: tl.constexpr,
    MAX_CODE: tl.constexpr,
    RCEIL: tl.constexpr,
    CAST: tl.constexpr,
):
    """`GROUPS` runs of `GROUP` adjacent values of the result a program."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    mask = group < groups
    first = group * GROUP  # in the result; a row of it is half as long as one of `hidden`
    row = first // H
    at = (first + row * H)[:, None] + tl.arange(0, GROUP)[None, :]
    gate = tl.load(hidden + at, mask=mask[:, None], other=0.0).to(tl.float32)
    up = tl.load(hidden + at + H, mask=mask[:, None], other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if weights is not None:
        value *= tl.load(weights + row, mask=mask, other=0.0).to(tl.float32)[:, None]
    _store(value, codes, scales, first, mask, GROUP, MBITS, MIN, MAX, MAX_CODE, RCEIL, CAST)


@triton.jit
def _swiglu_quantize_backward_kernel(
    d_act,
    hidden,
    weights,
    codes,
    scales,
    parts,
    groups,
    H,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    MBITS: tl.constexpr,
    MIN: tl.constexpr,
    MAX: tl.constexpr,
    MAX_CODE: tl.constexpr,
    RCEIL: tl.constexpr,
    CAST: tl.constexpr,
):
    """`GROUPS` runs of `GROUP` adjacent values of either half a program."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    mask = group < groups
    first = group * GROUP
    inside = tl.arange(0, GROUP)[None, :]
    row = first // H
    gate_at = first + row * H
    gradient = tl.load(d_act + first[:, None] + inside, mask=mask[:, None], other=0.0).to(
        tl.float32
    )
    at = gate_at[:, None] + inside
    gate = tl.load(hidden + at, mask=mask[:, None], other=0.0).to(tl.float32)
    up = tl.load(hidden + at + H, mask=mask[:, None], other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    if weights is not None:
        tl.store(parts + group, tl.sum(gradient * silu * up, 1), mask=mask)
        gradient *= tl.load(weights + row, mask=mask, other=0.0).to(tl.float32)[:, None]
    d_gate = gradient * up * (sigmoid + silu * (1.0 - sigmoid))
    _store(d_gate, codes, scales, gate_at, mask, GROUP, MBITS, MIN, MAX, MAX_CODE, RCEIL, CAST)
    d_up = gradient * silu
    _store(d_up, codes, scales, gate_at + H, mask, GROUP, MBITS, MIN, MAX, MAX_CODE, RCEIL, CAST)
