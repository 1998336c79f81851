# pyright: reportArgumentType=false, reportCallIssue=false
"""What biases of the experts need: sums over an expert's rows, and a vector an expert for them.

    sums[e]  = sum over the rows r of e of  weight[r] * rows[source[r]]     the gradient of a bias
    y[r]    += weight[r] * bias[e]
    dot[r]   = <rows[source[r]], bias[e]>

where `source[r]` is r itself, or the token of the route in row r. No atomics: each number is
written by one program, which adds in the order of the rows or columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tile_map import make_tile_map

_ROWS = 32
_COLUMNS = 128


def sum_rows(
    rows: Tensor,
    offsets_E: Tensor,
    *,
    route_R: Tensor | None = None,
    weights: Tensor | None = None,
    top_k: int = 1,
) -> Tensor:
    """Add the rows of each expert in float32, (E, F) in the dtype of `rows`; zeros for no rows.

    Args:
        rows: Packed rows (R, F), or tokens (T, F) gathered by `route_R // top_k`.
        offsets_E: Ends of the experts' rows, (E,) int32.
        route_R: The route in each row, (R,) int32, or None.
        weights: A float32 factor a route (a row without `route_R`), packed, or None for 1.
        top_k: Routes a token.
    """
    E, F = offsets_E.shape[0], rows.shape[1]
    sums_EF = rows.new_empty(E, F)
    _sum_kernel[(E, triton.cdiv(F, _COLUMNS))](
        rows,
        offsets_E,
        route_R,
        weights,
        sums_EF,
        (rows if route_R is None else route_R).shape[0],
        F,
        TOP_K=top_k,
        GATHER=route_R is not None,
        SCALED=weights is not None,
        BM=_ROWS,
        BN=_COLUMNS,
    )
    return sums_EF


def add_to_rows(
    y_RF: Tensor,
    bias_EF: Tensor,
    offsets_E: Tensor,
    *,
    route_R: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    """Add the vector of its expert to every row of packed `y_RF`, times the weight of the row."""
    R, F = y_RF.shape
    tiles = make_tile_map(offsets_E, R, _ROWS)
    _add_kernel[(tiles.expert.shape[0], triton.cdiv(F, _COLUMNS))](
        y_RF,
        bias_EF,
        route_R,
        weights,
        *tiles,
        F,
        GATHER=route_R is not None,
        SCALED=weights is not None,
        BM=_ROWS,
        BN=_COLUMNS,
    )


def dot_rows(
    rows: Tensor,
    bias_EF: Tensor,
    offsets_E: Tensor,
    num_rows: int,
    *,
    route_R: Tensor | None = None,
    top_k: int = 1,
) -> Tensor:
    """Multiply every row (or gathered token) with the vector of its expert, (R,) float32.

    Rows past the last offset are not written.
    """
    tiles = make_tile_map(offsets_E, num_rows, _ROWS)
    dots_R = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
    _dot_kernel[(tiles.expert.shape[0],)](
        rows,
        bias_EF,
        route_R,
        dots_R,
        *tiles,
        rows.shape[1],
        TOP_K=top_k,
        GATHER=route_R is not None,
        BM=_ROWS,
        BN=_COLUMNS,
    )
    return dots_R


@triton.jit
def _sum_kernel(
    rows,
    offsets,
    route,
    weights,
    sums,
    R,
    F,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    SCALED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One expert and BN columns a program, BM rows a step."""
    expert = tl.program_id(0)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.minimum(tl.load(offsets + expert), R)
    total = tl.zeros((BN,), tl.float32)
    for first in range(start, end, BM):
        row = first + tl.arange(0, BM)
        source = _sources(route, first, end, GATHER, BM)
        at = source
        if GATHER:
            at = source // TOP_K
        mask = (row < end)[:, None] & (columns < F)[None, :]
        tile = tl.load(rows + at.to(tl.int64)[:, None] * F + columns[None, :], mask=mask, other=0.0)
        tile = tile.to(tl.float32)
        if SCALED:
            tile *= tl.load(weights + source)[:, None]
        # Past the end the last row is repeated, whose weight may be infinite: 0 times that is NaN.
        total += tl.sum(tl.where(mask, tile, 0.0), 0)
    out = sums + expert.to(tl.int64) * F + columns
    tl.store(out, total.to(sums.dtype.element_ty), mask=columns < F)


@triton.jit
def _add_kernel(
    y,
    bias,
    route,
    weights,
    tile_expert,
    tile_row,
    tile_end,
    tile_count,
    F,
    GATHER: tl.constexpr,
    SCALED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One tile of rows and BN columns a program; a tile that is not in use is left alone."""
    i = tl.program_id(0)
    if i < tl.load(tile_count):
        expert, row, end = tl.load(tile_expert + i), tl.load(tile_row + i), tl.load(tile_end + i)
        columns = tl.program_id(1) * BN + tl.arange(0, BN)
        rows = row + tl.arange(0, BM)
        at_bias = bias + expert.to(tl.int64) * F + columns
        value = tl.load(at_bias, mask=columns < F, other=0.0).to(tl.float32)[None, :]
        if SCALED:
            source = _sources(route, row, end, GATHER, BM)
            value = value * tl.load(weights + source)[:, None]
        at = y + rows.to(tl.int64)[:, None] * F + columns[None, :]
        mask = (rows < end)[:, None] & (columns < F)[None, :]
        total = tl.load(at, mask=mask, other=0.0).to(tl.float32) + value
        tl.store(at, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _dot_kernel(
    rows,
    bias,
    route,
    dots,
    tile_expert,
    tile_row,
    tile_end,
    tile_count,
    F,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One tile of rows a program, BN columns a step."""
    i = tl.program_id(0)
    if i < tl.load(tile_count):
        expert, row, end = tl.load(tile_expert + i), tl.load(tile_row + i), tl.load(tile_end + i)
        source = _sources(route, row, end, GATHER, BM)
        if GATHER:
            source = source // TOP_K
        source = source.to(tl.int64)[:, None] * F
        total = tl.zeros((BM,), tl.float32)
        for first in range(0, F, BN):
            columns = first + tl.arange(0, BN)
            mask = (columns < F)[None, :]
            tile = tl.load(rows + source + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            at_bias = bias + expert.to(tl.int64) * F + columns
            vector = tl.load(at_bias, mask=columns < F, other=0.0).to(tl.float32)
            total += tl.sum(tile * vector[None, :], 1)
        tl.store(dots + row + tl.arange(0, BM), total, mask=row + tl.arange(0, BM) < end)


@triton.jit
def _sources(route, row, end, GATHER: tl.constexpr, BM: tl.constexpr):
    """The route of each row of a tile, or the row itself; past the end, as the last row."""
    rows = tl.minimum(row + tl.arange(0, BM), end - 1)
    if GATHER:
        return tl.load(route + rows)
    else:
        return rows
