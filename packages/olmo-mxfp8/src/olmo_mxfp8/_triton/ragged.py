# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""Descriptors of rows whose reads and writes end where the rows of an expert end.

A descriptor checks the bounds of a whole tensor, and a tile of the last rows of an expert reaches
into the next one's. With two leading dimensions that do not exist, the hardware checks an end that
the kernel chooses (as `triton.tools.ragged_tma` does): over rows of stride s, with strides
`2^34 - s, s, s`, the coordinates `2^30, end, row + 2^30 - end` lie at

    2^30 (2^34 - s) + s end + s (row + 2^30 - end) = 2^64 + s row

which is `row` modulo 2^64, and the last of them reaches the size 2^30 exactly at `row = end`. Reads
give zero there and writes do nothing.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_ROWS = 2**30
UNBOUNDED = 2**31 - 2**16


def ragged(rows: Tensor, block: list[int]) -> TensorDescriptor:
    """Describe packed `rows`, (R, F), by tiles of `block`."""
    stride = rows.shape[1]
    shape = [UNBOUNDED, UNBOUNDED, MAX_ROWS, stride]
    return TensorDescriptor(rows, shape, [2**34 - stride, stride, stride, 1], [1, 1, *block])


@triton.jit
def load_until(rows, end, row, column):
    """The tile at (row, column); zero from row `end` on."""
    block = rows.load([1 << 30, end, row + (1 << 30) - end, column])
    return tl.reshape(block, (block.shape[2], block.shape[3]))


@triton.jit
def store_until(rows, end, row, column, tile):
    """Store `tile` at (row, column), rounded to the dtype of `rows`; nothing from `end` on."""
    block = tl.reshape(tile.to(rows.dtype), (1, 1, tile.shape[0], tile.shape[1]))
    rows.store([1 << 30, end, row + (1 << 30) - end, column], block)
