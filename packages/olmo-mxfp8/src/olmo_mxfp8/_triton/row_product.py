# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""`y[r] = a[r] @ b[e].T` for the rows of every expert, in one of two kinds.

- plain: ordinary operands, such as dequantised ones.
- native: FP8 codes with a scale for each 32, which the units of Blackwell take as they are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import tiling
from .ragged import ragged, store_until
from .tile_list import list_tiles, place_of


def row_product(
    a_RK: Tensor,
    b_ENK: Tensor,
    offsets_E: Tensor,
    out_dtype: torch.dtype,
    *,
    kind: tiling.Kind = "plain",
    a_scales: Tensor | None = None,
    b_scales: Tensor | None = None,
    cut: tiling.Tiling | None = None,
) -> Tensor:
    """Multiply each expert's rows by its weights; rows past the last offset become zero.

    Args:
        a_RK: Packed, (R, K); rows past the last offset may hold anything.
        b_ENK: Packed, (E, N, K).
        offsets_E: Ends of the experts' rows, (E,) int32.
        out_dtype: Of the result; the sum is float32.
        kind: What the operands are.
        a_scales: uint8, (R, K / 32), of native operands.
        b_scales: uint8, (E, N, K / 32), of native operands.
        cut: The tiling; that of the device when None.
    """
    R, K = a_RK.shape
    E, N, _ = b_ENK.shape
    y_RN = a_RK.new_empty(R, N, dtype=out_dtype)
    cut = cut or tiling.row_product(kind, out_dtype, a_RK.device)
    tiles, capacity = list_tiles(offsets_E, R, cut.rows)
    _row_product_kernel[(tiling.num_programs(a_RK.device),)](
        TensorDescriptor.from_tensor(a_RK, [cut.rows, cut.inner]),
        TensorDescriptor.from_tensor(b_ENK, [1, cut.columns, cut.inner]),
        ragged(y_RN, [cut.rows, cut.columns]),
        y_RN,
        a_scales,
        b_scales,
        offsets_E,
        tiles,
        capacity,
        R,
        N,
        K,
        E,
        KIND=kind,
        A_FORMAT=_FORMATS.get(a_RK.dtype, ""),
        B_FORMAT=_FORMATS.get(b_ENK.dtype, ""),
        FLATTEN=cut.flatten,
        **cut.options,
    )
    return y_RN


_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@triton.jit
def _row_product_kernel(
    a,
    b,
    y,
    y_pointer,
    a_scales,
    b_scales,
    offsets,
    tiles,
    capacity,
    R,
    N,
    K,
    E,
    KIND: tl.constexpr,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Compute a (BM, BN) tile of `y` at a time; one program walks over many.

    A tile reads up to BM - 1 rows past its expert's. They spoil rows of the result that are not
    stored, and no others.
    """
    down, across = tl.load(tiles + 2 * capacity), tl.cdiv(N, BN)
    for number in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=FLATTEN):
        i, j = place_of(number, down, across, GROUP)
        expert, row = tl.load(tiles + i), tl.load(tiles + capacity + i)
        # For scales, which no descriptor guards.
        rows = tl.minimum(row + tl.arange(0, BM), R - 1).to(tl.int64)
        accumulator = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, K, BK):
            left = a.load([row, k])
            right = tl.reshape(b.load([expert, j * BN, k]), (BN, BK))
            if KIND == "plain":
                accumulator = tl.dot(left, right.T, accumulator)
            else:
                tl.static_assert(KIND == "native")
                block = k // 32 + tl.arange(0, BK // 32)
                columns = tl.minimum(j * BN + tl.arange(0, BN), N - 1)
                columns += expert.to(tl.int64) * N
                inside = (block < K // 32)[None, :]
                a_at = rows[:, None] * (K // 32) + block[None, :]
                b_at = columns[:, None] * (K // 32) + block[None, :]
                accumulator = tl.dot_scaled(
                    left,
                    tl.load(a_scales + a_at, mask=inside, other=0),
                    A_FORMAT,
                    right.T,
                    tl.load(b_scales + b_at, mask=inside, other=0),
                    B_FORMAT,
                    accumulator,
                )
        end = tl.minimum(tl.load(offsets + expert), R)
        store_until(y, end, row, j * BN, accumulator)
    _zero_tail(y_pointer, tl.maximum(tl.load(offsets + E - 1), 0), R, N, BN)


@triton.jit
def _zero_tail(y, first, R, N, BN: tl.constexpr):
    """Write zeros from row `first` to the last; 8 rows a program in turn."""
    for start in tl.range(first + tl.program_id(0) * 8, R, tl.num_programs(0) * 8):
        rows = start + tl.arange(0, 8)
        for column in tl.range(0, N, BN):
            columns = column + tl.arange(0, BN)
            at = rows.to(tl.int64)[:, None] * N + columns[None, :]
            mask = (rows < R)[:, None] & (columns < N)[None, :]
            tl.store(y + at, tl.zeros((8, BN), y.dtype.element_ty), mask=mask)
