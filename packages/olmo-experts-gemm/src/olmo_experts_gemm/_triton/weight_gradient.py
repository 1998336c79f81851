# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""`dw[e] = left_e.T @ right_e`: the gradient of the weights, a sum over the rows of the expert.

One of the two may be tokens instead of rows, gathered by the loads. The sum is written, or added to
what a float32 tensor holds.
"""

import triton
import triton.language as tl
from torch import Tensor

from . import tiling
from .ragged import descriptor, load_rows, ragged_descriptor, slices
from .tile_map import tile_at


def weight_gradient(
    left: Tensor,
    right: Tensor,
    offsets_E: Tensor,
    *,
    route_R: Tensor | None = None,
    gather: str = "none",
    top_k: int = 1,
    into: Tensor | None = None,
    cut: tiling.Tiling | None = None,
) -> Tensor:
    """Sum the outer products of each expert's rows.

    Args:
        left: Packed rows (R, F), or tokens (T, F) if `gather` is `"left"`.
        right: Packed rows (R, D), or tokens (T, D) if `gather` is `"right"`.
        offsets_E: Ends of the experts' rows, (E,) int32.
        route_R: The route in each row, (R,) int32; its token is `route // top_k`.
        gather: Which of the two is tokens: `"none"`, `"left"` or `"right"`.
        top_k: Routes a token.
        into: Packed float32 (E, F, D) to add to, or None for a new tensor in the dtype of `left`.
        cut: The tiling; chosen by size when `None`.

    Returns:
        `dw`, (E, F, D), or `into`. An expert without rows gets zeros, or keeps what `into` holds.
    """
    E, F, D = offsets_E.shape[0], left.shape[1], right.shape[1]
    R = (left if gather != "left" else right).shape[0]
    dw = left.new_empty(E, F, D) if into is None else into
    # The gathered operand is the faster one on the left, so a gathered right computes `dw.T`.
    transposed = gather == "right"
    if transposed:
        left, right, F, D = right, left, D, F
    cut = cut or tiling.weight_gradient(
        left, F, D, gathered=gather != "none", adds=into is not None
    )
    width = cut.columns // cut.pieces
    _weight_gradient_kernel[cut.grid(left.device)](
        ragged_descriptor(left, [cut.inner, cut.rows]) if gather == "none" else left,
        ragged_descriptor(right, [cut.inner, cut.columns]),
        descriptor(dw, [1, width, cut.rows] if transposed else [1, cut.rows, width]),
        route_R,
        offsets_E,
        R,
        E,
        F,
        D,
        TOP_K=top_k,
        GATHER=gather != "none",
        TRANSPOSED=transposed,
        ADD=into is not None,
        **cut.options,
    )
    return dw


@triton.jit
def _weight_gradient_kernel(
    left,
    right,
    dw,
    route,
    offsets,
    R,
    E,
    F,
    D,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ADD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Compute a (BM, BN) tile of `left_e.T @ right_e` at a time, over BK rows a step.

    The loads give zeros past the expert's end.
    """
    WIDTH: tl.constexpr = BN // PIECES
    # A multiple of 8: so told, the compiler moves 16 bytes at once.
    F = F // 8 * 8
    down, across = tl.cdiv(F, BM), tl.cdiv(D, BN)
    inner = tl.arange(0, BK)
    tiles = down * across
    for number in tl.range(tl.program_id(0), E * tiles, tl.num_programs(0), flatten=FLATTEN):
        expert = number // tiles
        start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
        end = tl.minimum(tl.load(offsets + expert), R)
        i, j = tile_at(number % tiles, down, across, GROUP)
        if GATHER:
            columns = i * BM + tl.arange(0, BM)
            columns = tl.where(columns < F, columns, 0)
            columns = tl.max_contiguous(tl.multiple_of(columns, 8), 8)
        accumulator = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(start, end, BK):
            if GATHER:
                rows = k + inner
                token = tl.load(route + rows, mask=rows < end, other=0) // TOP_K
                a = tl.load(
                    left + token.to(tl.int64)[:, None] * F + columns[None, :],
                    mask=(rows < end)[:, None],
                    other=0.0,
                )
            else:
                a = load_rows(left, end, k, i * BM)
            b = load_rows(right, end, k, j * BN)
            accumulator = tl.dot(a.T, b, accumulator)
        parts = slices(accumulator, PIECES)
        for s in tl.static_range(PIECES):
            if TRANSPOSED:
                row, column = j * BN + s * WIDTH, i * BM
                part = tl.reshape(parts[s].T, (1, WIDTH, BM))
            else:
                row, column = i * BM, j * BN + s * WIDTH
                part = tl.reshape(parts[s], (1, BM, WIDTH))
            if ADD:
                part += dw.load([expert, row, column])
            dw.store([expert, row, column], part.to(dw.dtype))
