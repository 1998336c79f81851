# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""`dw[e] = a_e.T @ b_e` over the tokens of each expert, as `token_product`, in three parts at once.

A program has one warp that copies codes and scales into a ring of buffers, and two groups of four
warps that each multiply half the rows of a tile, as `coarse_product` does: while one group scales
and adds, the units work for the other. Tiles of any number of steps follow one another without a
gap, because the copying warp runs ahead into the next.
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

_BLOCK = 128  # tokens a step, and the height and width of a tile
_DTYPES = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}
_COPYING_REGISTERS, _MULTIPLYING_REGISTERS = 40, 232
"""Of a thread that copies and of one that multiplies: 128 (40 + 2 * 232) are all there are."""


def token_product(
    a_FT: Tensor,
    a_scales: Tensor,
    b_DT: Tensor,
    b_scales: Tensor,
    offsets_E: Tensor,
    num_rows: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply operands of `quantize_tokens`, of the same rows; arguments as of `token_product`."""
    F, D, E = a_FT.shape[0], b_DT.shape[0], offsets_E.numel()
    dw_EFD = a_FT.new_empty(E, F, D, dtype=out_dtype)
    _token_product_kernel[(tiling.num_programs(a_FT.device),)](
        _describe(a_FT, _BLOCK),
        _describe(b_DT, _BLOCK),
        _describe(dw_EFD.view(E * F, D), _BLOCK // 2),
        a_scales,
        b_scales,
        offsets_E,
        num_rows,
        F,
        D,
        E,
        # A float32 tile takes the memory of one more buffer.
        STAGES=5 if out_dtype.itemsize == 2 else 4,
        GROUP=8,
        COPYING=_COPYING_REGISTERS,
        MULTIPLYING=_MULTIPLYING_REGISTERS,
        num_warps=4,
    )
    return dw_EFD


def _describe(matrix: Tensor, height: int) -> TensorDescriptor:
    """Describe a packed matrix by tiles 128 wide."""
    return TensorDescriptor.from_tensor(matrix, [height, _BLOCK], _layout(height, matrix.dtype))


@cache
def _layout(height: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([height, _BLOCK], _DTYPES[dtype])


@gluon.jit
def _token_product_kernel(
    a,
    b,
    dw,
    a_scales,
    b_scales,
    offsets,
    R,
    F,
    D,
    E,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    COPYING: gl.constexpr,
    MULTIPLYING: gl.constexpr,
):
    """Compute a (128, 128) tile of `dw[e]` at a time, 128 tokens a step."""
    a_buffers = gl.allocate_shared_memory(a.dtype, [STAGES, 128, 128], a.layout)
    b_buffers = gl.allocate_shared_memory(b.dtype, [STAGES, 128, 128], b.layout)
    dw_buffers = gl.allocate_shared_memory(dw.dtype, [2, 64, 128], dw.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    ring = (a_buffers, b_buffers, full, empty)
    walk = (offsets, R, F, D, E)
    given = (dw, a_scales, b_scales, dw_buffers)
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
    offsets, R, F, D, E = walk
    a_buffers, b_buffers, full, empty = ring
    turn = 0
    for number in range(gl.program_id(0), E * (F // 128) * (D // 128), gl.num_programs(0)):
        _, i, j, first, last = _tile(number, offsets, R, F, D, GROUP)
        for place in range(first, last):
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, a.block_type.nbytes + b.block_type.nbytes)
            tma.async_copy_global_to_shared(
                a, [i * 128, place * 128], ready, a_buffers.index(stage)
            )
            tma.async_copy_global_to_shared(
                b, [j * 128, place * 128], ready, b_buffers.index(stage)
            )
            turn += 1


@gluon.jit
def _multiply(given, walk, ring, PART: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """Compute 64 rows of every tile: the upper ones (PART 0) or the lower (PART 1)."""
    dw, a_scales, b_scales, dw_buffers = given
    offsets, R, F, D, E = walk
    a_buffers, b_buffers, full, empty = ring
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    WIDE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    zero = gl.zeros([64, 128], gl.float32, LAYOUT)
    turn = 0
    for number in range(gl.program_id(0), E * (F // 128) * (D // 128), gl.num_programs(0)):
        expert, i, j, first, last = _tile(number, offsets, R, F, D, GROUP)
        row = i * 128 + 64 * PART
        a_at = a_scales + row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        b_at = b_scales + j * 128 + gl.arange(0, 128, WIDE)
        a_next, b_next = _load_scales(a_at, b_at, first, last, F, D)
        total = zero
        for place in range(first, last):
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
            left = a_buffers.index(stage).slice(64 * PART, 64)
            right = b_buffers.index(stage).permute((1, 0))
            product = warpgroup_mma(left, right, zero, use_acc=False, is_async=True)
            a_scale = a_next
            b_scale = gl.convert_layout(b_next, gl.SliceLayout(0, LAYOUT))
            # Those of the next step, so that nobody waits for them.
            a_next, b_next = _load_scales(a_at, b_at, place + 1, last, F, D)
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(empty.index(stage))
            # One after the other: the product of two scales may be infinite where the sum is 0.
            total += product * b_scale[None, :] * a_scale[:, None]
            turn += 1
        out = dw_buffers.index(PART)
        tma.store_wait(0)
        out.store(total.to(dw.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dw, [expert * F + row, j * 128], out)
    tma.store_wait(0)


@gluon.jit
def _load_scales(a_at, b_at, place, last, F, D):
    """The scales of the block at `place`; past the last those of the last."""
    at = gl.maximum(gl.minimum(place, last - 1), 0).to(gl.int64)
    return gl.load(a_at + at * F), gl.load(b_at + at * D)


@gluon.jit
def _tile(number, offsets, R, F, D, GROUP: gl.constexpr):
    """The expert of the tile that is computed as `number`-th, its place, and its blocks."""
    down, across = F // 128, D // 128
    expert = number // (down * across)
    inside = number % (down * across)
    band = inside // (GROUP * across)
    height = gl.minimum(down - band * GROUP, GROUP)
    within = inside - band * (GROUP * across)
    i, j = band * GROUP + within % height, within // height
    end = gl.minimum(gl.load(offsets + expert), R)
    start = gl.load(offsets + gl.maximum(expert - 1, 0))
    start = gl.where(expert > 0, gl.maximum(start, 0), 0)
    first = start // 128 + expert
    return expert, i, j, first, first + gl.cdiv(gl.maximum(end - start, 0), 128)
