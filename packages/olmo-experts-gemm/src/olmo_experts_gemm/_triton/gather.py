# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""A copy of the tokens, and of the weights of their routes, in the order of the rows."""

import triton
import triton.language as tl
from torch import Tensor


def gather_rows(
    x_TD: Tensor, weights: Tensor | None, offsets_E: Tensor, route_R: Tensor, top_k: int
) -> tuple[Tensor, Tensor | None]:
    """Return `x_TD[route_R // top_k]` (R, D), and `weights.flatten()[route_R]` (R,) if there are.

    Args:
        x_TD: Packed tokens.
        weights: A factor a route, packed (T, K) float32, or None.
        offsets_E: Ends of the experts' rows, (E,) int32; nothing past the last is read or written.
        route_R: The route in each row, (R,) int32.
        top_k: Routes a token.
    """
    R, D = route_R.shape[0], x_TD.shape[1]
    x_RD = x_TD.new_empty(R, D)
    weights_R = None if weights is None else weights.new_empty(R)
    _gather_kernel[(R,)](
        x_TD,
        weights,
        route_R,
        offsets_E,
        x_RD,
        weights_R,
        R,
        offsets_E.shape[0],
        D,
        TOP_K=top_k,
        BLOCK=min(1024, triton.next_power_of_2(D)),
        num_warps=4,
    )
    return x_RD, weights_R


@triton.jit
def _gather_kernel(
    x,
    weights,
    route,
    offsets,
    x_rows,
    weight_rows,
    R,
    E,
    D,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.minimum(tl.load(offsets + E - 1), R):
        return
    source = tl.load(route + row)
    if weights is not None:
        tl.store(weight_rows + row, tl.load(weights + source))
    # A multiple of 8: so told, the compiler moves 16 bytes at once.
    D = D // 8 * 8
    token = (source // TOP_K).to(tl.int64)
    for first in range(0, D, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(x + token * D + column, mask=column < D)
        tl.store(x_rows + row * D + column, value, mask=column < D)
