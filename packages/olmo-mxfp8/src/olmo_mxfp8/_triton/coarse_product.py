# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""`y[r] = a[r] @ b[e].T` of FP8 codes with coarse scales, on Hopper's units.

128 values of the contraction share a scale in every row of `a`, and one with all rows of a tile of
`b`, so that a step of 128 is one product of codes, which is scaled and added in float32. It is also
what bounds the error: the units keep about 13 bits of a sum of FP8 products, and here no more than
128 of them are summed there.

A program has three parts that run at once. One warp copies tiles into a ring of buffers; two groups
of four warps each multiply half the rows of a tile. While one group scales and adds, the units work
for the other; and within a group the product of the second half of a step runs while that of the
first is added. Triton's language has no way to say this, its Gluon dialect has.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import tiling
from .ragged import MAX_ROWS, UNBOUNDED
from .tile_list import list_tiles

ROWS = 128
"""Height of an output tile; a group of warps has 64 of them."""
_DTYPES = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}
_COPYING_REGISTERS, _MULTIPLYING_REGISTERS = 40, 232
"""Of a thread that copies and of one that multiplies: 128 (40 + 2 * 232) are all there are."""


def coarse_product(
    a_RK: Tensor,
    a_scales: Tensor,
    b_ENK: Tensor,
    b_scales: Tensor,
    offsets_E: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply each expert's rows by its weights; rows past the last offset become zero.

    Args:
        a_RK: Codes, packed, (R, K); rows past the last offset may hold anything.
        a_scales: uint8, packed, (R, K / 32); equal in fours.
        b_ENK: Codes, packed, (E, N, K); N and K are multiples of 128.
        b_scales: uint8, packed, (E, N, K / 32); equal over tiles of 128 x 128.
        offsets_E: Ends of the experts' rows, (E,) int32.
        out_dtype: Of the result; the sum is float32.
    """
    R, K = a_RK.shape
    E, N, _ = b_ENK.shape
    y_RN = a_RK.new_empty(R, N, dtype=out_dtype)
    tiles, capacity = list_tiles(offsets_E, R, ROWS)
    _coarse_product_kernel[(tiling.num_programs(a_RK.device),)](
        _describe(a_RK),
        _describe(b_ENK.view(E * N, K)),
        _describe_rows(y_RN),
        y_RN,
        a_scales,
        b_scales,
        offsets_E,
        tiles,
        capacity,
        R,
        N,
        K,
        E,
        # A float32 tile takes the memory of one more buffer.
        STAGES=3 if out_dtype.itemsize == 2 else 2,
        GROUP=8,
        COPYING=_COPYING_REGISTERS,
        MULTIPLYING=_MULTIPLYING_REGISTERS,
        num_warps=4,
    )
    return y_RN


def _describe(codes: Tensor) -> TensorDescriptor:
    """Describe a packed matrix of codes by tiles of 128 x 128."""
    return TensorDescriptor.from_tensor(codes, [ROWS, 128], _layout((ROWS, 128), codes.dtype))


def _describe_rows(y: Tensor) -> TensorDescriptor:
    """Describe the result by tiles of 64 x 128 whose writes end where an expert's rows do.

    As `ragged`, in the form that Gluon takes.
    """
    stride = y.shape[1]
    block = [1, 1, ROWS // 2, 128]
    shape = [UNBOUNDED, UNBOUNDED, MAX_ROWS, stride]
    strides = [2**34 - stride, stride, stride, 1]
    return TensorDescriptor(y, shape, strides, block, _layout(tuple(block), y.dtype))


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])


@gluon.jit
def _coarse_product_kernel(
    a,
    b,
    y,
    y_pointer,
    a_scales,
    b_scales,
    offsets,
    tiles,
    capacity,
    R,
    N,
    K,
    E,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    COPYING: gl.constexpr,
    MULTIPLYING: gl.constexpr,
):
    """Compute a (128, 128) tile of `y` at a time; one program walks over many.

    A stage holds two steps: the tiles of `a` and `b` for 256 of the contraction. A tile reads up to
    127 rows past its expert's; they spoil rows of the result that are not stored, and no others.
    """
    a_buffers = gl.allocate_shared_memory(a.dtype, [2 * STAGES, 128, 128], a.layout)
    b_buffers = gl.allocate_shared_memory(b.dtype, [2 * STAGES, 128, 128], b.layout)
    y_buffers = gl.allocate_shared_memory(y.dtype, [2, 1, 1, 64, 128], y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    _zero_tail(y_pointer, gl.maximum(gl.load(offsets + E - 1), 0), R, N)
    ring = (a_buffers, b_buffers, full, empty)
    walk = (tiles, capacity, N, K)
    given = (y, a_scales, b_scales, offsets, R, y_buffers)
    gl.warp_specialize(
        [
            (_multiply, (given, walk, ring, 0, STAGES, GROUP)),
            (_multiply, (given, walk, ring, 1, STAGES, GROUP)),
            (_copy, (a, b, walk, ring, STAGES, GROUP)),
        ],
        [4, 1],
        [MULTIPLYING, COPYING],
    )


@gluon.jit
def _copy(a, b, walk, ring, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """Fill the stages, in the order in which `_multiply` empties them."""
    tiles, capacity, N, K = walk
    a_buffers, b_buffers, full, empty = ring
    down, across = gl.load(tiles + 2 * capacity), gl.cdiv(N, 128)
    turn = 0
    for number in range(gl.program_id(0), down * across, gl.num_programs(0)):
        i, j = _place_of(number, down, across, GROUP)
        row, column = gl.load(tiles + capacity + i), gl.load(tiles + i) * N + j * 128
        for k in range(0, K, 256):
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            ready = full.index(stage)
            # Of an odd number of steps the last is copied with one of zeros, past the end of K.
            mbarrier.expect(ready, 2 * (a.block_type.nbytes + b.block_type.nbytes))
            for half in gl.static_range(2):
                at = k + 128 * half
                slot = 2 * stage + half
                tma.async_copy_global_to_shared(a, [row, at], ready, a_buffers.index(slot))
                tma.async_copy_global_to_shared(b, [column, at], ready, b_buffers.index(slot))
            turn += 1


@gluon.jit
def _multiply(given, walk, ring, PART: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """Compute 64 rows of every tile: the upper ones (PART 0) or the lower (PART 1)."""
    y, a_scales, b_scales, offsets, R, y_buffers = given
    tiles, capacity, N, K = walk
    a_buffers, b_buffers, full, empty = ring
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    zero = gl.zeros([64, 128], gl.float32, LAYOUT)
    down, across = gl.load(tiles + 2 * capacity), gl.cdiv(N, 128)
    steps = K // 128
    turn = 0
    for number in range(gl.program_id(0), down * across, gl.num_programs(0)):
        i, j = _place_of(number, down, across, GROUP)
        expert, row = gl.load(tiles + i), gl.load(tiles + capacity + i) + 64 * PART
        # For scales, which no descriptor guards.
        rows = gl.minimum(row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), R - 1)
        a_at = a_scales + rows.to(gl.int64) * (K // 32)
        b_at = b_scales + (expert.to(gl.int64) * N + j * 128) * (K // 32)
        first = _load_scales(a_at, b_at, 0, steps)
        second = _load_scales(a_at, b_at, 1, steps)
        total = zero
        for step in range(0, steps, 2):
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
            left = a_buffers.index(2 * stage).slice(64 * PART, 64)
            right = b_buffers.index(2 * stage).permute((1, 0))
            product = warpgroup_mma(left, right, zero, use_acc=False, is_async=True)
            scale, next_scale = _scale(first), _scale(second)
            # Those of the next stage, so that nobody waits for them.
            first = _load_scales(a_at, b_at, step + 2, steps)
            second = _load_scales(a_at, b_at, step + 3, steps)
            product = warpgroup_mma_wait(0, deps=[product])
            left = a_buffers.index(2 * stage + 1).slice(64 * PART, 64)
            right = b_buffers.index(2 * stage + 1).permute((1, 0))
            next_product = warpgroup_mma(left, right, zero, use_acc=False, is_async=True)
            total += product * scale[:, None]
            next_product = warpgroup_mma_wait(0, deps=[next_product])
            mbarrier.arrive(empty.index(stage))
            total += next_product * next_scale[:, None]
            turn += 1
        end = gl.minimum(gl.load(offsets + expert), R)
        out = y_buffers.index(PART)
        tma.store_wait(0)
        out.reshape([64, 128]).store(total.to(y.dtype))
        fence_async_shared()
        at = [1 << 30, end, row + (1 << 30) - end, j * 128]
        tma.async_copy_shared_to_global(y, at, out)
    tma.store_wait(0)


@gluon.jit
def _load_scales(a_at, b_at, step, steps):
    """The first byte of four of `step`; past the last step its own, to be multiplied by zeros."""
    byte = 4 * gl.minimum(step, steps - 1)
    return gl.load(a_at + byte), gl.load(b_at + byte)


@gluon.jit
def _scale(scale_bytes):
    a_byte, b_byte = scale_bytes
    scale = _value(a_byte.to(gl.int32)) * _value(b_byte.to(gl.int32))
    # Exact from 2^-149 to 2^127. Below it is 0, and the step is lost. Above it would be infinite,
    # and a sum of zero would become NaN: it is 2^127, which is too small for every sum but those
    # from 2 on, which overflow with it as they should.
    return gl.where(scale == float("inf"), 1.7014118346046923e38, scale)


@gluon.jit
def _value(byte):
    """As `codes.scale_value`: byte 0 is a subnormal, byte 255 is NaN."""
    ends = (byte == 0) | (byte == 255)
    return ((byte << 23) | gl.where(ends, 0x400000, 0)).to(gl.float32, bitcast=True)


@gluon.jit
def _place_of(number, down, across, GROUP: gl.constexpr):
    """As `tile_list.place_of`, which Gluon cannot call."""
    band = number // (GROUP * across)
    height = gl.minimum(down - band * GROUP, GROUP)
    inside = number - band * (GROUP * across)
    return band * GROUP + inside % height, inside // height


@gluon.jit
def _zero_tail(y, first, R, N):
    """Write zeros from row `first` to the last; a row a program in turn."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for row in range(first + gl.program_id(0), R, gl.num_programs(0)):
        for column in range(0, N, 128):
            at = row.to(gl.int64) * N + column + gl.arange(0, 128, LAYOUT)
            gl.store(y + at, gl.zeros([128], y.dtype.element_ty, LAYOUT))
