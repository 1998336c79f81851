# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Descriptors of stacked rows whose reads and writes end where an expert's rows end.

The rows of all experts lie one after another in one tensor, and a tile of the last rows of an
expert reaches into the next expert's. The bounds that the hardware checks are those of the whole
tensor, so the descriptor describes a tensor with more dimensions than there are (the scheme of
`triton.tools.ragged_tma`): for a tensor of shape (R, ...) with a row stride `s`

    shape    (2^31 - 2^16, 2^31 - 2^16, 2^30, ...)
    strides  (2^34 - s,    s,           s,    ...)

the coordinates `(2^30, end, 2^30 - end + row)` address, modulo 2^64, row `row`:
`2^30 (2^34 - s) + end s + (2^30 - end + row) s = 2^64 + row s`, and the third coordinate leaves its
dimension exactly when `row` reaches `end`: a read gives zero there, a write does nothing.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_MANY = 2**31 - 2**16
MAX_ROWS = 2**30


def ragged_descriptor(rows: Tensor, block: list[int]) -> TensorDescriptor:
    """Describe `rows`, of up to 3 dimensions, by tiles of `block`, bounded where a call says."""
    return TensorDescriptor(rows, *ragged_shape(rows), [1, 1, *block])


def ragged_shape(rows: Tensor) -> tuple[list[int], list[int]]:
    """The shape and the strides of the descriptor."""
    stride = rows.stride(0)
    shape = [_MANY, _MANY, MAX_ROWS, *rows.shape[1:]]
    return shape, [2**34 - stride, stride, *rows.stride()]


def descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Describe a packed tensor by tiles of `block`; reads past it give zero."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


@triton.jit
def load_rows(rows, end, row, column):
    """Load the tile at (row, column); rows at or past `end` are zero."""
    tile = rows.load([0x40000000, end, 0x40000000 - end + row, column])
    return tl.reshape(tile, (tile.shape[2], tile.shape[3]))


@triton.jit
def store_rows(rows, end, row, column, tile):
    """Store `tile` at (row, column) in the dtype of `rows`; nothing at or past `end`."""
    tile = tl.reshape(tile.to(rows.dtype), (1, 1, tile.shape[0], tile.shape[1]))
    rows.store([0x40000000, end, 0x40000000 - end + row, column], tile)


@triton.jit
def store_half(rows, end, row, half, column, tile):
    """Store `tile` at (row, half, column) of rows that have two halves, as `store_rows`."""
    tile = tl.reshape(tile.to(rows.dtype), (1, 1, tile.shape[0], 1, tile.shape[1]))
    rows.store([0x40000000, end, 0x40000000 - end + row, half, column], tile)


@triton.jit
def halves(tile):
    """The left and the right half of a tile's columns."""
    split = tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2))
    return tl.split(tl.permute(split, (0, 2, 1)))


@triton.jit
def slices(tile, COUNT: tl.constexpr):
    """`COUNT` (1, 2, 4 or 8) slices of a tile's columns, from left to right."""
    if COUNT == 1:
        return (tile,)
    else:
        left, right = halves(tile)
        return slices(left, COUNT // 2) + slices(right, COUNT // 2)
