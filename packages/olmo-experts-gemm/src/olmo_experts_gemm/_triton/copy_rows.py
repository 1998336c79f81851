# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""A copy of the tokens, and of the weights of their routes, in the order of the rows."""

import triton
import triton.language as tl
from torch import Tensor


def copy_rows(
    x_TD: Tensor, weights_TK: Tensor | None, row_TK: Tensor, num_rows: int
) -> tuple[Tensor, Tensor | None]:
    """Copy each token, and the weights if there are, to the rows of its routes.

    Args:
        x_TD: Packed tokens.
        weights_TK: A factor a route, packed float32, or None.
        row_TK: The row of each route, packed int32; -1 for none.
        num_rows: R.

    Returns:
        `x_RD` and the weights (R,); rows that are no route's stay unwritten.
    """
    (T, K), D = row_TK.shape, x_TD.shape[1]
    x_RD = x_TD.new_empty(num_rows, D)
    weights_R = None if weights_TK is None else weights_TK.new_empty(num_rows)
    _copy_kernel[(T,)](
        x_TD,
        weights_TK,
        row_TK,
        x_RD,
        weights_R,
        K,
        D,
        BLOCK=min(4096, triton.next_power_of_2(D)),
        num_warps=4,
    )
    return x_RD, weights_R


@triton.jit
def _copy_kernel(x, weights, row_of, x_rows, weight_rows, K, D, BLOCK: tl.constexpr):
    """One token a program, which is read once and written K times."""
    token = tl.program_id(0).to(tl.int64)
    # A multiple of 8: so told, the compiler moves 16 bytes at once.
    D = D // 8 * 8
    for first in range(0, D, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(x + token * D + column, mask=column < D)
        for k in range(K):
            row = tl.load(row_of + token * K + k).to(tl.int64)
            tl.store(x_rows + row * D + column, value, mask=(column < D) & (row >= 0))
            if weights is not None:
                weight = tl.load(weights + token * K + k)
                tl.store(weight_rows + row, weight, mask=(row >= 0) & (first == 0))
