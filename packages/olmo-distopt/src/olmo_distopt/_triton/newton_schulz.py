# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The products of a Newton-Schulz iteration, for stacks of matrices on Hopper's units.

    A = X X^T,  P = b A + c A A  by `symmetric_product`,  X <- a X + P X  by `apply`

A and P are symmetric, so that half of their tiles need no work.

Shapes: n matrices X (n, M, K), A and P (n, M, M).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_TILE = 128
_DEPTH = 64


def symmetric_product(
    x: Tensor, plus: Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0
) -> Tensor:
    """Return `alpha x @ x.mT + beta plus`, (n, M, M), added in float32 and rounded once.

    Args:
        x: Packed, (n, M, K); M and K times the bytes of a value are multiples of 16.
        plus: Packed, (n, M, M), symmetric; None for nothing.
        alpha: Of the product.
        beta: Of `plus`.
    """
    n, M, K = x.shape
    y = x.new_empty(n, M, M)
    # In float32, as tests have it, a tile is half as deep and half as wide.
    wide = x.dtype.itemsize == 2
    depth, width = (_DEPTH, 2 * _TILE) if wide else (_DEPTH // 2, _TILE)
    square = [1, _TILE, _TILE]
    _symmetric_product_kernel[(_programs(x.device),)](
        TensorDescriptor.from_tensor(x, [1, _TILE, depth]),
        TensorDescriptor.from_tensor(x, [1, width, depth]),
        TensorDescriptor.from_tensor(y if plus is None else plus, square),
        TensorDescriptor.from_tensor(y, square),
        n,
        M,
        K,
        alpha,
        beta,
        TILE=_TILE,
        HALVES=width // _TILE,
        DEPTH=depth,
        PLUS=plus is not None,
        num_warps=8,
        num_stages=3,
    )
    return y


def apply(p: Tensor, x: Tensor, *, beta: float) -> Tensor:
    """Return `p @ x + beta x`, (n, M, K), added in float32 and rounded once.

    Args:
        p: Packed, (n, M, M), as `x` of `symmetric_product`.
        x: Packed, (n, M, K).
        beta: Of `x`.
    """
    n, M, K = x.shape
    y = torch.empty_like(x)
    wide = x.dtype.itemsize == 2
    depth, width = (_DEPTH, 2 * _TILE) if wide else (_DEPTH // 2, _TILE)
    tile = [1, _TILE, width // 2]
    _apply_kernel[(_programs(x.device),)](
        TensorDescriptor.from_tensor(p, [1, _TILE, depth]),
        TensorDescriptor.from_tensor(x, [1, depth, width]),
        TensorDescriptor.from_tensor(x, tile),
        TensorDescriptor.from_tensor(y, tile),
        n,
        M,
        K,
        beta,
        TILE=_TILE,
        WIDTH=width,
        DEPTH=depth,
        num_warps=8,
        num_stages=3,
    )
    return y


def _programs(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _apply_kernel(
    p,
    x,
    more,
    y,
    n,
    M,
    K,
    beta,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute a (TILE, WIDTH) tile at a time, and add and store its halves one after another."""
    down, across = tl.cdiv(M, TILE), tl.cdiv(K, WIDTH)
    count = down * across
    for number in tl.range(tl.program_id(0), n * count, tl.num_programs(0), flatten=True):
        matrix, inside = number // count, number % count
        # Down the columns, so that programs of one time share those of `x`.
        i, j = inside % down, inside // down
        accumulator = tl.zeros((TILE, WIDTH), tl.float32)
        for k in tl.range(0, M, DEPTH):
            left = tl.reshape(p.load([matrix, i * TILE, k]), (TILE, DEPTH))
            right = tl.reshape(x.load([matrix, k, j * WIDTH]), (DEPTH, WIDTH))
            accumulator = tl.dot(left, right, accumulator, input_precision="ieee")
        split = tl.reshape(accumulator, (TILE, 2, WIDTH // 2))
        first, second = tl.split(tl.permute(split, (0, 2, 1)))
        _add_and_store(y, more, [matrix, i * TILE, j * WIDTH], first, beta)
        _add_and_store(y, more, [matrix, i * TILE, j * WIDTH + WIDTH // 2], second, beta)


@triton.jit
def _add_and_store(y, more, at, tile, beta):
    tile += beta * tl.reshape(more.load(at), tile.shape).to(tl.float32)
    y.store(at, tl.reshape(tile.to(y.dtype), (1, tile.shape[0], tile.shape[1])))


@triton.jit
def _symmetric_product_kernel(
    upper,
    lower,
    plus,
    y,
    n,
    M,
    K,
    alpha,
    beta,
    TILE: tl.constexpr,
    HALVES: tl.constexpr,
    DEPTH: tl.constexpr,
    PLUS: tl.constexpr,
):
    """Compute the tiles on and below the diagonal, and store each one below it twice.

    A tile has TILE rows and HALVES of TILE columns. `HALVES` rows of tiles have equally many: those
    numbered `g` have `g + 1`, so that `HALVES g (g + 1) / 2` tiles are in the rows before.
    """
    rows = tl.cdiv(M, TILE)
    groups = tl.cdiv(rows, HALVES)
    count = HALVES * groups * (groups + 1) // 2
    for number in tl.range(tl.program_id(0), n * count, tl.num_programs(0), flatten=True):
        matrix = number // count
        inside = number % count
        group = _group_of(inside, HALVES)
        inside -= HALVES * group * (group + 1) // 2
        i, j = group * HALVES + inside % HALVES, inside // HALVES
        accumulator = tl.zeros((TILE, HALVES * TILE), tl.float32)
        for k in tl.range(0, K, DEPTH):
            left = tl.reshape(upper.load([matrix, i * TILE, k]), (TILE, DEPTH))
            right = tl.reshape(lower.load([matrix, j * HALVES * TILE, k]), (HALVES * TILE, DEPTH))
            accumulator = tl.dot(left, right.T, accumulator, input_precision="ieee")
        accumulator *= alpha
        if HALVES == 1:
            _store(y, plus, matrix, i, j, M, accumulator, beta, PLUS)
        else:
            split = tl.reshape(accumulator, (TILE, 2, TILE))
            first, second = tl.split(tl.permute(split, (0, 2, 1)))
            _store(y, plus, matrix, i, 2 * j, M, first, beta, PLUS)
            _store(y, plus, matrix, i, 2 * j + 1, M, second, beta, PLUS)


@triton.jit
def _group_of(inside, HALVES: tl.constexpr):
    """The largest g with `HALVES g (g + 1) / 2 <= inside`."""
    root = tl.sqrt(1.0 + 8.0 * (inside // HALVES).to(tl.float32))
    group = ((root - 1.0) * 0.5).to(tl.int32)
    # The root is rounded.
    group += (HALVES * (group + 1) * (group + 2) // 2 <= inside).to(tl.int32)
    return group - (HALVES * group * (group + 1) // 2 > inside).to(tl.int32)


@triton.jit
def _store(y, plus, matrix, i, j, M, tile, beta, PLUS: tl.constexpr):
    """Store a square tile at (i, j) and its mirror image; nothing above the diagonal.

    What is not to be stored goes past the last column, where a descriptor writes nothing: the
    compiler cannot join the loops around an `if`.
    """
    TILE: tl.constexpr = tile.shape[0]
    column = tl.where(j <= i, j * TILE, M)
    if PLUS:
        more = tl.reshape(plus.load([matrix, i * TILE, column]), (TILE, TILE))
        tile += beta * more.to(tl.float32)
    rounded = tile.to(y.dtype)
    y.store([matrix, i * TILE, column], tl.reshape(rounded, (1, TILE, TILE)))
    column = tl.where(j < i, i * TILE, M)
    y.store([matrix, j * TILE, column], tl.reshape(rounded.T, (1, TILE, TILE)))
