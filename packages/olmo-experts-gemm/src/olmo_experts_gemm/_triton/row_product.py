# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""`y[r] = x[r] @ w[e].T` for the rows of every expert: forward, and the gradient of the rows."""

import triton
import triton.language as tl
from torch import Tensor

from . import tiling
from .ragged import descriptor, ragged_descriptor, slices, store_rows
from .tile_map import TileMap, make_tile_map, tile_at


def row_product(
    x_RD: Tensor,
    w_EFD: Tensor,
    offsets_E: Tensor,
    *,
    transposed: bool = False,
    zero_tail: bool = True,
    route_R: Tensor | None = None,
    top_k: int = 1,
    tiles: TileMap | None = None,
    cut: tiling.Tiling | None = None,
) -> Tensor:
    """Multiply each expert's rows by its weights.

    Args:
        x_RD: Packed rows, (R, D); or tokens (T, D), gathered by `route_R // top_k`.
        w_EFD: Packed weights, (E, F, D), or (E, D, F) if `transposed`.
        offsets_E: Ends of the experts' rows, (E,) int32.
        transposed: Multiply by `w[e]` rather than `w[e].T`.
        zero_tail: Write zeros past the last offset; otherwise those rows stay unwritten.
        route_R: The route in each row, (R,) int32, or None for rows that lie ready.
        top_k: Routes a token.
        tiles: The tile map of these offsets for the tiling that is used, if there is one already.
        cut: The tiling; chosen by size when `None`.

    Returns:
        `y_RF`, (R, F).
    """
    R, D = (x_RD if route_R is None else route_R).shape[0], x_RD.shape[1]
    E, F = w_EFD.shape[0], w_EFD.shape[2 if transposed else 1]
    y_RF = x_RD.new_empty(R, F)
    cut = cut or tiling.row_product(x_RD, F, D, gathered=route_R is not None)
    tiles = tiles or make_tile_map(offsets_E, R, cut.rows)
    width = cut.columns
    block = [1, cut.inner, width] if transposed else [1, width, cut.inner]
    _row_product_kernel[cut.grid(x_RD.device)](
        descriptor(x_RD, [cut.rows, cut.inner]) if route_R is None else x_RD,
        descriptor(w_EFD, block),
        ragged_descriptor(y_RF, [cut.rows, width // cut.pieces]),
        y_RF,
        route_R,
        offsets_E,
        *tiles,
        R,
        F,
        D,
        E,
        TOP_K=top_k,
        GATHER=route_R is not None,
        EVEN=D % cut.inner == 0,
        TRANSPOSED=transposed,
        ZERO_TAIL=zero_tail,
        FLATTEN=cut.flatten,
        **cut.options,
    )
    return y_RF


@triton.jit
def _row_product_kernel(
    x,
    w,
    y,
    y_ptr,
    route,
    offsets,
    tile_expert,
    tile_row,
    tile_end,
    tile_count,
    R,
    F,
    D,
    E,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    EVEN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Compute a (BM, BN) tile of `y` at a time, accumulated in float32.

    Rows past the expert's end, which the loads do reach, are not stored.
    """
    # Multiples of 8: so told, the compiler moves 16 bytes at once.
    F, D = F // 8 * 8, D // 8 * 8
    inner = tl.arange(0, BK)
    down, across = tl.load(tile_count), tl.cdiv(F, BN)
    for number in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=FLATTEN):
        i, j = tile_at(number, down, across, GROUP)
        expert, row, end = tl.load(tile_expert + i), tl.load(tile_row + i), tl.load(tile_end + i)
        if GATHER:
            source = find_sources(route, row, end, BM) // TOP_K
            tokens = x + source.to(tl.int64)[:, None] * D + inner[None, :]
        accumulator = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, D, BK):
            if not GATHER:
                a = x.load([row, k])
            elif EVEN:
                a = tl.load(tokens + k)
            else:
                a = tl.load(tokens + k, mask=(inner + k < D)[None, :], other=0.0)
            if TRANSPOSED:
                b = tl.reshape(w.load([expert, k, j * BN]), (BK, BN))
            else:
                b = tl.reshape(w.load([expert, j * BN, k]), (BN, BK)).T
            accumulator = tl.dot(a, b, accumulator)
        parts = slices(accumulator, PIECES)
        for s in tl.static_range(PIECES):
            store_rows(y, end, row, j * BN + s * (BN // PIECES), parts[s])
    if ZERO_TAIL:
        columns = tl.arange(0, BN)
        first = tl.load(offsets + E - 1) + tl.program_id(0) * 8
        for r in tl.range(first, R, tl.num_programs(0) * 8):
            rows = r + tl.arange(0, 8)
            for c in tl.range(0, F, BN):
                out = y_ptr + rows.to(tl.int64)[:, None] * F + (c + columns)[None, :]
                mask = (rows < R)[:, None] & (c + columns < F)[None, :]
                tl.store(out, tl.zeros((8, BN), y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def find_sources(route, row, end, BM: tl.constexpr):
    """The route in each row of a tile; past the expert's end, that of its last row."""
    return tl.load(route + tl.minimum(row + tl.arange(0, BM), end - 1))
