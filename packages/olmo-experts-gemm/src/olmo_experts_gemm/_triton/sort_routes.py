# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""The order of the routes by (expert, token, slot): a stable counting sort without atomics.

Each program counts the experts in its block of routes; the counts become, for every block and
expert, the number of routes that lie before; each program then places the routes of its block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_EXPERTS = 16
"""Experts a program of the scan."""
_BLOCKS = 128
"""Blocks of routes a step of the scan."""


def sort_routes(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the routes; those of id -1 get no row, and an id past the last expert is an error.

    Returns:
        `offsets_E` (E,) int32, ends of the experts' rows; `route_R` (N,) int32, the route in each
        row, unwritten past the last offset; `row_TK` (T, K) int32, the row of each route, or -1.
    """
    ids = expert_ids_TK.contiguous()
    N, EP = ids.numel(), max(_EXPERTS, triton.next_power_of_2(num_experts))
    block = max(16, min(256, 2**15 // EP))
    blocks = triton.cdiv(N, block)
    # Apart from one another: what is kept for backward must not keep the scratch, and an operator
    # must not return two views of one tensor.
    offsets_E, route_R, row_N, scratch = (
        torch.empty(size, dtype=torch.int32, device=ids.device)
        for size in (num_experts, N, N, (blocks + 1) * EP)
    )
    total, before = scratch.split([EP, blocks * EP])
    _count_kernel[(blocks,)](
        ids, before, N, num_experts, EP, block, debug=True, sanitize_overflow=False
    )
    _scan_kernel[(EP // _EXPERTS,)](before, total, blocks, EP, _EXPERTS, _BLOCKS)
    _place_kernel[(max(1, blocks),)](
        ids, before, total, offsets_E, route_R, row_N, N, num_experts, EP, block, num_warps=8
    )
    return offsets_E, route_R, row_N.view(expert_ids_TK.shape)


@triton.jit
def _count_kernel(ids, counts, N, E, EP: tl.constexpr, BLOCK: tl.constexpr):
    """One block of routes a program."""
    route = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + route, mask=route < N, other=-1)
    tl.device_assert(expert < E, "`expert_ids_TK` must be below the number of experts")
    routed = (expert >= 0) & (expert < E)
    count = tl.histogram(tl.where(routed, expert, 0).to(tl.int32), EP, mask=routed)
    tl.store(counts + tl.program_id(0).to(tl.int64) * EP + tl.arange(0, EP), count)


@triton.jit
def _scan_kernel(
    counts, total, blocks, EP: tl.constexpr, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr
):
    """A few experts a program; each count is replaced by the sum of those before it."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    running = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        at = counts + block.to(tl.int64)[:, None] * EP + expert[None, :]
        mask = (block < blocks)[:, None] & (expert < EP)[None, :]
        count = tl.load(at, mask=mask, other=0)
        tl.store(at, running[None, :] + tl.cumsum(count, 0) - count, mask=mask)
        running += tl.sum(count, 0)
    tl.store(total + expert, running, mask=expert < EP)


@triton.jit
def _place_kernel(
    ids, before, total, offsets, route_of, row_of, N, E, EP: tl.constexpr, BLOCK: tl.constexpr
):
    """One block of routes a program.

    A route's row is its expert's start, the routes of that expert in the blocks before, and those
    before it in its block.
    """
    e = tl.arange(0, EP)
    count = tl.load(total + e)
    ends = tl.cumsum(count, 0)
    if tl.program_id(0) == 0:
        tl.store(offsets + e, ends, mask=e < E)
    block = tl.program_id(0).to(tl.int64)
    start = ends - count + tl.load(before + block * EP + e, mask=N > 0, other=0)
    route = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + route, mask=route < N, other=-1)
    routed = (expert >= 0) & (expert < E)
    expert = tl.where(routed, expert, -1).to(tl.int32)
    mine = (expert[:, None] == e[None, :]).to(tl.int32)
    rank = tl.cumsum(mine, 0) - mine
    row = tl.sum(tl.where(mine > 0, start[None, :] + rank, 0), 1)
    tl.store(route_of + row, route, mask=routed)
    tl.store(row_of + route, tl.where(routed, row, -1), mask=route < N)
