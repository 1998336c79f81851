# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""`dw[e] = a_e.T @ b_e` over the tokens of each expert, on Hopper's FP8 units.

The operands are those of `quantize_tokens`: 128 tokens at a time share a scale in every row of `dw`
and in every column. A step is one product of codes over such a block, which is scaled and added in
float32, so that the units, which keep about 13 bits of a sum of FP8 products, never add more than
128 of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import tiling
from .quantize_tokens import BLOCK
from .tile_list import place_of


def token_product(
    a_FT: Tensor,
    a_scales: Tensor,
    b_DT: Tensor,
    b_scales: Tensor,
    offsets_E: Tensor,
    num_rows: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply operands of `quantize_tokens`, of the same rows.

    Args:
        a_FT: Codes, FP8, (F, T); F and D are multiples of 128.
        a_scales: float32, (P, F).
        b_DT: Codes, FP8, (D, T), of a format that may differ.
        b_scales: float32, (P, D).
        offsets_E: Ends of the experts' rows, (E,) int32.
        num_rows: R.
        out_dtype: Of the result; the sum is float32.

    Returns:
        (E, F, D); exact zeros for an expert without rows.
    """
    F, D, E = a_FT.shape[0], b_DT.shape[0], offsets_E.numel()
    dw_EFD = a_FT.new_empty(E, F, D, dtype=out_dtype)
    cut = _cut(a_FT.device)
    _token_product_kernel[(tiling.num_programs(a_FT.device) * _PROGRAMS,)](
        TensorDescriptor.from_tensor(a_FT, [cut.rows, BLOCK]),
        TensorDescriptor.from_tensor(b_DT, [cut.columns, BLOCK]),
        TensorDescriptor.from_tensor(dw_EFD, [1, cut.rows, cut.columns]),
        a_scales,
        b_scales,
        offsets_E,
        num_rows,
        F,
        D,
        E,
        **cut.options,
    )
    return dw_EFD


# A multiprocessor holds two programs of four warps: while one scales and adds, the units work for
# the other. One program of a whole tile took 1.3 to 2.0 times as long on an H200.
_PROGRAMS = 2


def _cut(device: torch.device) -> tiling.Tiling:
    if tiling.generation(device) == 0:
        return tiling.Tiling(rows=32, columns=64, inner=BLOCK)
    return tiling.Tiling(rows=64, columns=128, inner=BLOCK, warps=4)


@triton.jit
def _token_product_kernel(
    a,
    b,
    dw,
    a_scales,
    b_scales,
    offsets,
    R,
    F,
    D,
    E,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute a (BM, BN) tile of `dw[e]` at a time, a block of tokens a step."""
    down, across = tl.cdiv(F, BM), tl.cdiv(D, BN)
    count = down * across
    for number in tl.range(tl.program_id(0), E * count, tl.num_programs(0)):
        expert = number // count
        i, j = place_of(number % count, down, across, GROUP)
        end = tl.minimum(tl.load(offsets + expert), R)
        start = tl.maximum(tl.load(offsets + expert - 1, mask=expert > 0, other=0), 0)
        first = start // BK + expert
        rows, columns = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)
        last = first + tl.cdiv(end - start, BK)
        a_at, b_at = a_scales + rows, b_scales + columns
        # Of the next step, asked for while this one multiplies.
        a_next = tl.load(a_at + tl.cast(first, tl.int64) * F, mask=first < last, other=0.0)
        b_next = tl.load(b_at + tl.cast(first, tl.int64) * D, mask=first < last, other=0.0)
        accumulator = tl.zeros((BM, BN), tl.float32)
        for place in tl.range(first, last):
            left = a.load([i * BM, place * BK])
            right = b.load([j * BN, place * BK])
            a_scale, b_scale = a_next, b_next
            at = tl.cast(place + 1, tl.int64)
            a_next = tl.load(a_at + at * F, mask=place + 1 < last, other=0.0)
            b_next = tl.load(b_at + at * D, mask=place + 1 < last, other=0.0)
            # One after the other: the product of two scales may be infinite where the sum is 0.
            accumulator += tl.dot(left, right.T) * b_scale[None, :] * a_scale[:, None]
        tile = tl.reshape(accumulator.to(dw.dtype), (1, BM, BN))
        dw.store([expert, i * BM, j * BN], tile)
