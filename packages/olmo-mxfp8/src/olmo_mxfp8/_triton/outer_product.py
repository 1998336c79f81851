# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""`dw[e] = a_e.T @ b_e`, over the rows of each expert: the gradient of the weights."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import tiling
from .ragged import load_until, ragged
from .tile_list import place_of


def outer_product(
    a_RN: Tensor,
    b_RK: Tensor,
    offsets_E: Tensor,
    out_dtype: torch.dtype,
    *,
    cut: tiling.Tiling | None = None,
) -> Tensor:
    """Sum the outer products of each expert's rows.

    Args:
        a_RN: Packed, (R, N).
        b_RK: Packed, (R, K), the dtype of `a_RN`.
        offsets_E: Ends of the experts' rows, (E,) int32. Nobody asserts them here.
        out_dtype: Of the result; the sum is float32.
        cut: The tiling; that of the device when None.

    Returns:
        (E, N, K); exact zeros for an expert without rows.
    """
    (R, N), K, E = a_RN.shape, b_RK.shape[1], offsets_E.numel()
    dw_ENK = a_RN.new_empty(E, N, K, dtype=out_dtype)
    cut = cut or tiling.outer_product(out_dtype, a_RN.device)
    _outer_product_kernel[(tiling.num_programs(a_RN.device),)](
        ragged(a_RN, [cut.inner, cut.rows]),
        ragged(b_RK, [cut.inner, cut.columns]),
        TensorDescriptor.from_tensor(dw_ENK, [1, cut.rows, cut.columns]),
        offsets_E,
        R,
        N,
        K,
        E,
        EXPERTS=triton.next_power_of_2(E),
        **cut.options,
    )
    return dw_ENK


@triton.jit
def _outer_product_kernel(
    a,
    b,
    dw,
    offsets,
    R,
    N,
    K,
    E,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute a (BM, BN) tile of `dw[e]` at a time, BK rows a step; reads end with the expert.

    One loop goes over the steps of all tiles of a program, so that the loads of a tile begin during
    the epilogue of the one before: no compiler joins loops whose inner one differs in length.
    """
    down, across = tl.cdiv(N, BM), tl.cdiv(K, BN)
    count = down * across
    program, programs = tl.program_id(0), tl.num_programs(0)
    steps = _steps(offsets, R, E, count, EXPERTS, BK)
    # One step before the first tile, so that the first step moves on to it.
    number = program - programs
    expert, i, j, row, end = 0, 0, 0, 0, 0
    accumulator = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(steps):
        row += BK
        if row >= end:
            number += programs
            expert = number // count
            row, end = _rows_of(offsets, expert, R)
            i, j = place_of(number % count, down, across, GROUP)
        left = load_until(a, end, row, i * BM)
        right = load_until(b, end, row, j * BN)
        accumulator = tl.dot(left.T, right, accumulator)
        if row + BK >= end:
            tile = tl.reshape(accumulator.to(dw.dtype), (1, BM, BN))
            dw.store([expert, i * BM, j * BN], tile)
            accumulator = tl.zeros((BM, BN), tl.float32)


@triton.jit
def _rows_of(offsets, expert, R):
    """The first row of an expert and the end of its rows, whatever the offsets hold."""
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    return tl.maximum(start, 0), tl.minimum(tl.load(offsets + expert), R)


@triton.jit
def _steps(offsets, R, E, count, EXPERTS: tl.constexpr, BK: tl.constexpr):
    """The steps of this program over all its tiles: at least one a tile, which is then zero."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    e = tl.arange(0, EXPERTS)
    start = tl.maximum(tl.load(offsets + e - 1, mask=(e > 0) & (e < E), other=0), 0)
    end = tl.minimum(tl.load(offsets + e, mask=e < E, other=0), R)
    before = tl.cdiv(e * count - program, programs)
    after = tl.cdiv((e + 1) * count - program, programs)
    steps = tl.maximum(tl.cdiv(end - start, BK), 1) * (after - before)
    return tl.sum(tl.where(e < E, steps, 0), 0)
