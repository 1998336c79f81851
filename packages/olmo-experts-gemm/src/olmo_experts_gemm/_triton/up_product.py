# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""The first product of the expert MLP with the activation behind it, on rows gathered from tokens.

    [gate, up] = x[token] @ w_gate_up[e].T (+ b)       saved for backward when asked
    a          = weight * activate(gate, up)           what the second product multiplies

Scaling here by the weight of the route makes the second product a plain one, and the sum over a
token's rows a pure sum.
"""

import triton
import triton.language as tl
from torch import Tensor

from olmo_experts_gemm._activation import has_gate

from . import tiling
from .activation import activate
from .ragged import descriptor, halves, ragged_descriptor, slices, store_half, store_rows
from .row_product import find_sources
from .tile_map import TileMap, make_tile_map, tile_at


def up_product(
    x: Tensor,
    w_gate_up: Tensor,
    bias: Tensor | None,
    offsets_E: Tensor,
    *,
    route_R: Tensor | None,
    weights: Tensor | None,
    top_k: int,
    activation: str,
    save_hidden: bool,
    tiles: TileMap | None = None,
    cut: tiling.Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the hidden layer of every row.

    Args:
        x: Packed tokens (T, D), gathered by `route_R // top_k`; or packed rows (R, D).
        w_gate_up: Packed, (E, 2H, D); (E, H, D) for an activation without a gate.
        bias: One a row of `w_gate_up[e]`, packed, or None.
        offsets_E: Ends of the experts' rows, (E,) int32.
        route_R: The route in each row, (R,) int32, or None for rows that lie ready.
        weights: A float32 factor a route (a row without `route_R`), packed, or None for 1.
        top_k: Routes a token.
        activation: A name that `activate` knows.
        save_hidden: Also write what backward needs.
        tiles: As for `row_product`.
        cut: As for `row_product`; `columns` counts those of the accumulator, gate and up together.

    Returns:
        The layer (R, H), and `[gate, up]` (R, 2H), of no rows unless saved. Rows past the last
        offset are not written.
    """
    gated = has_gate(activation)
    E, D = w_gate_up.shape[0], x.shape[1]
    H = w_gate_up.shape[1] // 2 if gated else w_gate_up.shape[1]
    R = x.shape[0] if route_R is None else route_R.shape[0]
    cut = cut or tiling.up_product(
        x, H, D, plain=gated and bias is None, gathered=route_R is not None
    )
    tiles = tiles or make_tile_map(offsets_E, R, cut.rows)
    halves_ = 2 if gated else 1
    width = cut.columns // halves_
    a_RH = x.new_empty(R, H)
    hidden = x.new_empty(R if save_hidden else 0, halves_ * H)
    saved = (hidden if save_hidden else x.new_empty(1, halves_ * H)).view(-1, halves_, H)
    _up_product_kernel[cut.grid(x.device)](
        descriptor(x, [cut.rows, cut.inner]) if route_R is None else x,
        descriptor(w_gate_up.view(E, halves_, H, D), [1, halves_, width, cut.inner]),
        ragged_descriptor(saved, [cut.rows, 1, width // cut.pieces]),
        ragged_descriptor(a_RH, [cut.rows, width // cut.pieces]),
        bias,
        route_R,
        weights,
        *tiles,
        H,
        D,
        TOP_K=top_k,
        GATHER=route_R is not None,
        SCALED=weights is not None,
        BIASED=bias is not None,
        SAVE=save_hidden,
        ACTIVATION=activation,
        GATED=gated,
        EVEN=D % cut.inner == 0,
        FLATTEN=cut.flatten,
        **cut.options,
    )
    return a_RH, hidden


@triton.jit
def _up_product_kernel(
    x,
    w,
    hidden,
    a,
    bias,
    route,
    weights,
    tile_expert,
    tile_row,
    tile_end,
    tile_count,
    H,
    D,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    SAVE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Compute a (BM, WIDTH) tile of the hidden layer at a time.

    With a gate the accumulator holds WIDTH columns of it and the same of `up` beside them; one
    descriptor load brings both weights.
    """
    HALVES: tl.constexpr = 2 if GATED else 1
    WIDTH: tl.constexpr = BN // HALVES
    # Multiples of 8: so told, the compiler moves 16 bytes at once.
    H, D = H // 8 * 8, D // 8 * 8
    down, across = tl.load(tile_count), tl.cdiv(H, WIDTH)
    inner = tl.arange(0, BK)
    for number in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=FLATTEN):
        i, j = tile_at(number, down, across, GROUP)
        expert, row, end = tl.load(tile_expert + i), tl.load(tile_row + i), tl.load(tile_end + i)
        column = j * WIDTH
        if GATHER:
            source = find_sources(route, row, end, BM)
            tokens = x + (source // TOP_K).to(tl.int64)[:, None] * D + inner[None, :]
        accumulator = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, D, BK):
            if not GATHER:
                left = x.load([row, k])
            elif EVEN:
                left = tl.load(tokens + k)
            else:
                left = tl.load(tokens + k, mask=(inner + k < D)[None, :], other=0.0)
            right = tl.reshape(w.load([expert, 0, column, k]), (BN, BK))
            accumulator = tl.dot(left, right.T, accumulator)
        if GATED:
            gate, up = halves(accumulator)
        else:
            gate, up = accumulator, accumulator
        gates, ups = slices(gate, PIECES), slices(up, PIECES)
        if SCALED:
            if GATHER:
                weight = tl.load(weights + source)[:, None]
            else:
                rows = tl.minimum(row + tl.arange(0, BM), end - 1)
                weight = tl.load(weights + rows)[:, None]
        for s in tl.static_range(PIECES):
            gate, up = gates[s], ups[s]
            at = column + s * (WIDTH // PIECES)
            if BIASED:
                columns = at + tl.arange(0, WIDTH // PIECES)
                first = bias + expert.to(tl.int64) * HALVES * H + columns
                gate += tl.load(first, mask=columns < H, other=0.0).to(tl.float32)[None, :]
                if GATED:
                    up += tl.load(first + H, mask=columns < H, other=0.0).to(tl.float32)[None, :]
            if SAVE:
                store_half(hidden, end, row, 0, at, gate)
                if GATED:
                    store_half(hidden, end, row, 1, at, up)
            value = activate(gate, up, ACTIVATION)
            if SCALED:
                value *= weight
            store_rows(a, end, row, at, value)
