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
    block = [1, width, cut.rows] if transposed else [1, cut.rows, width]
    right_rows = ragged_descriptor(right, [cut.inner, cut.columns])
    if gather == "none":
        _weight_gradient_kernel[cut.grid(left.device)](
            ragged_descriptor(left, [cut.inner, cut.rows]),
            right_rows,
            descriptor(dw, block),
            offsets_E,
            R,
            E,
            F,
            D,
            EXPERTS=triton.next_power_of_2(E),
            ADD=into is not None,
            **cut.options,
        )
    else:
        _gathered_weight_gradient_kernel[cut.grid(left.device)](
            left,
            right_rows,
            descriptor(dw, block),
            route_R,
            offsets_E,
            R,
            E,
            F,
            D,
            TOP_K=top_k,
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
    offsets,
    R,
    E,
    F,
    D,
    ADD: tl.constexpr,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Compute a (BM, BN) tile of `left_e.T @ right_e` at a time, over BK rows a step.

    One loop goes over the steps of all tiles of a program, so that the loads of a tile begin during
    the epilogue of the one before; the compiler cannot join two loops whose inner one differs in
    length. The loads give zeros past the expert's end.
    """
    down, across = tl.cdiv(F, BM), tl.cdiv(D, BN)
    tiles = down * across
    program, programs = tl.program_id(0), tl.num_programs(0)
    steps = _steps(offsets, R, E, tiles, EXPERTS, BK)
    # One step before the first tile, so that the first step moves on to it.
    number = program - programs
    expert, i, j, k, stop = 0, 0, 0, 0, 0
    accumulator = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(steps):
        k += BK
        if k >= stop:
            number += programs
            expert = number // tiles
            k = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
            stop = tl.minimum(tl.load(offsets + expert), R)
            i, j = tile_at(number % tiles, down, across, GROUP)
        a = load_rows(left, stop, k, i * BM)
        b = load_rows(right, stop, k, j * BN)
        accumulator = tl.dot(a.T, b, accumulator)
        if k + BK >= stop:
            _store(dw, expert, i * BM, j * BN, accumulator, False, ADD, PIECES)
            accumulator = tl.zeros((BM, BN), tl.float32)


@triton.jit
def _steps(offsets, R, E, tiles, EXPERTS: tl.constexpr, BK: tl.constexpr):
    """The steps of this program over all its tiles: at least one a tile, which is then zero."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    e = tl.arange(0, EXPERTS)
    start = tl.load(offsets + e - 1, mask=(e > 0) & (e < E), other=0)
    end = tl.minimum(tl.load(offsets + e, mask=e < E, other=0), R)
    before = tl.cdiv(e * tiles - program, programs)
    after = tl.cdiv((e + 1) * tiles - program, programs)
    steps = tl.maximum(tl.cdiv(end - start, BK), 1) * (after - before)
    return tl.sum(tl.where(e < E, steps, 0), 0)


@triton.jit
def _gathered_weight_gradient_kernel(
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
    TRANSPOSED: tl.constexpr,
    ADD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Compute a (BM, BN) tile as above, the left rows being those of the tokens.

    A tile's loads wait for the look-up of its tokens, so there is nothing to begin early.
    """
    # A multiple of 8: so told, the compiler moves 16 bytes at once.
    F = F // 8 * 8
    down, across = tl.cdiv(F, BM), tl.cdiv(D, BN)
    inner = tl.arange(0, BK)
    tiles = down * across
    for number in tl.range(tl.program_id(0), E * tiles, tl.num_programs(0)):
        expert = number // tiles
        start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
        end = tl.minimum(tl.load(offsets + expert), R)
        i, j = tile_at(number % tiles, down, across, GROUP)
        columns = i * BM + tl.arange(0, BM)
        columns = tl.where(columns < F, columns, 0)
        columns = tl.max_contiguous(tl.multiple_of(columns, 8), 8)
        accumulator = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(start, end, BK):
            rows = k + inner
            token = tl.load(route + rows, mask=rows < end, other=0) // TOP_K
            a = tl.load(
                left + token.to(tl.int64)[:, None] * F + columns[None, :],
                mask=(rows < end)[:, None],
                other=0.0,
            )
            b = load_rows(right, end, k, j * BN)
            accumulator = tl.dot(a.T, b, accumulator)
        _store(dw, expert, i * BM, j * BN, accumulator, TRANSPOSED, ADD, PIECES)


@triton.jit
def _store(
    dw,
    expert,
    row,
    column,
    tile,
    TRANSPOSED: tl.constexpr,
    ADD: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Store, or add, a tile that begins at (row, column), in slices of its columns."""
    WIDTH: tl.constexpr = tile.shape[1] // PIECES
    parts = slices(tile, PIECES)
    for s in tl.static_range(PIECES):
        if TRANSPOSED:
            part = tl.reshape(parts[s].T, (1, WIDTH, tile.shape[0]))
            at = [expert, column + s * WIDTH, row]
        else:
            part = tl.reshape(parts[s], (1, tile.shape[0], WIDTH))
            at = [expert, row, column + s * WIDTH]
        if ADD:
            part += dw.load(at)
        dw.store(at, part.to(dw.dtype))
