# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""What follows the gradient of the hidden layer: its activation, its weights and their gradients.

With `g = dy[token] @ w_down[e]`, the gradient of an unweighted hidden layer `a`, and the weight `s`
of the row, one pass over the saved pre-activations yields the rest of backward:

    ds       = <g, a>                because <dy, a @ w_down.T> = <dy @ w_down, a>
    d hidden = activation_gradient(s g)
    s a      the rows that the gradient of `w_down` multiplies

so neither `a` nor the rows of the output are kept from forward (SonicMoE, arXiv:2512.14080).

The pass is a kernel of its own. In the epilogue of the product, where it would save writing and
reading `g`, nothing of it overlaps with the tensor cores in a plain Triton program, which costs
more than the memory traffic does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import activation_gradient
from .row_product import row_product
from .tile_map import TileMap

_ROWS = 8
_COLUMNS = 256


def down_gradient(
    dy: Tensor,
    w_down: Tensor,
    hidden: Tensor,
    offsets_E: Tensor,
    *,
    route_R: Tensor | None,
    weights: Tensor | None,
    top_k: int,
    activation: str,
    tiles: TileMap | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `d hidden`, the weighted hidden layer again, and parts of the weights' gradient.

    Args:
        dy: The gradient of the tokens (T, D), gathered by `route_R // top_k`; or of rows (R, D).
        w_down: Packed, (E, D, H).
        hidden: What `up_product` saved, (R, 2H), or (R, H) for an activation without a gate.
        offsets_E: Ends of the experts' rows, (E,) int32.
        route_R: As for `up_product`.
        weights: As for `up_product`.
        top_k: Routes a token.
        activation: A name that `activate` knows.
        tiles: As for `row_product`.

    Returns:
        `d hidden`, shaped as `hidden`; the weighted layer (R, H); and float32 parts (P, R), one or
        none, whose sum over P is `ds` of a row. Rows past the last offset are not written.
    """
    g_RH = row_product(
        dy,
        w_down,
        offsets_E,
        transposed=True,
        zero_tail=False,
        route_R=route_R,
        top_k=top_k,
        tiles=tiles,
    )
    R, H = g_RH.shape
    d_hidden = hidden.new_empty(hidden.shape)
    ds_PR = hidden.new_empty(0 if weights is None else 1, R, dtype=torch.float32)
    _down_gradient_kernel[(triton.cdiv(R, _ROWS),)](
        g_RH,
        hidden,
        d_hidden,
        ds_PR,
        route_R,
        weights,
        offsets_E,
        R,
        offsets_E.shape[0],
        H,
        GATHER=route_R is not None,
        SCALED=weights is not None,
        ACTIVATION=activation,
        GATED=hidden.shape[1] != H,
        ROWS=_ROWS,
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(H)),
        num_warps=4,
    )
    return d_hidden, g_RH, ds_PR


@triton.jit
def _down_gradient_kernel(
    g_ptr,
    hidden,
    d_hidden,
    ds,
    route,
    weights,
    offsets,
    R,
    E,
    H,
    GATHER: tl.constexpr,
    SCALED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`ROWS` rows a program, `COLUMNS` columns a step, in float32; nothing past the last offset.

    The weighted hidden layer takes the place of `g`.
    """
    last = tl.minimum(tl.load(offsets + E - 1), R)
    if tl.program_id(0) * ROWS >= last:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < last
    # A multiple of 8: so told, the compiler moves 16 bytes at once.
    H = H // 8 * 8
    at_row = row.to(tl.int64)[:, None] * H
    if SCALED:
        source = row
        if GATHER:
            source = tl.load(route + row, mask=inside, other=0)
        weight = tl.load(weights + source, mask=inside, other=0.0)[:, None]
    total = tl.zeros((ROWS,), tl.float32)
    dtype = g_ptr.dtype.element_ty
    for first in range(0, H, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (column < H)[None, :]
        at = at_row + column[None, :]
        at_gate = at
        if GATED:
            at_gate += at_row
        g = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(hidden + at_gate, mask=mask, other=0.0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(hidden + at_gate + H, mask=mask, other=0.0).to(tl.float32)
        value, d_gate, d_up = activation_gradient(g, gate, up, ACTIVATION)
        if SCALED:
            total += tl.sum(g * value, 1)
            value *= weight
            d_gate *= weight
            d_up *= weight
        tl.store(g_ptr + at, value.to(dtype), mask=mask)
        tl.store(d_hidden + at_gate, d_gate.to(dtype), mask=mask)
        if GATED:
            tl.store(d_hidden + at_gate + H, d_up.to(dtype), mask=mask)
    if SCALED:
        tl.store(ds + row, total, mask=inside)
