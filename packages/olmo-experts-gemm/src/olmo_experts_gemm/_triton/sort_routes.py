# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""The order of the routes by (expert, token, slot): a stable counting sort without atomics.

Each program counts the experts in its block of routes. Then each program adds up, for every expert,
the counts of the blocks before its own and of all blocks, sorts the routes of its block by (expert,
route), and places them: a route's row is its expert's first row, the routes of that expert in the
blocks before, and those before it in its block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 256
"""Blocks of routes that are sorted at the same time, within 64 to 1024 routes a block."""
_TABLE = 2**13
"""Blocks times experts that a program adds up at once: twice as many spill."""


def sort_routes(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the routes; those of id -1 get no row, and an id past the last expert is an error.

    Returns:
        `offsets_E` (E,) int32, ends of the experts' rows; `route_R` (N,) int32, the route in each
        row, unwritten past the last offset; `row_TK` (T, K) int32, the row of each route, or -1.
    """
    ids = expert_ids_TK.contiguous()
    N, EP = ids.numel(), max(2, triton.next_power_of_2(num_experts))
    block = max(64, min(1024, triton.next_power_of_2(triton.cdiv(N, _PROGRAMS))))
    blocks = triton.cdiv(N, block)
    # Apart from one another: what is kept for backward must not keep the counts, and an operator
    # must not return two views of one tensor.
    offsets_E, route_R, row_N, counts = (
        torch.empty(size, dtype=torch.int32, device=ids.device)
        for size in (num_experts, N, N, blocks * EP)
    )
    _count_kernel[(blocks,)](
        ids, counts, N, num_experts, EP, block, debug=True, sanitize_overflow=False
    )
    _place_kernel[(max(1, blocks),)](
        ids,
        counts,
        offsets_E,
        route_R,
        row_N,
        N,
        num_experts,
        blocks,
        EP,
        block,
        max(4, min(64, _TABLE // EP)),
        num_warps=8,
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
def _place_kernel(
    ids,
    counts,
    offsets,
    route_of,
    row_of,
    N,
    E,
    blocks,
    EP: tl.constexpr,
    BLOCK: tl.constexpr,
    READ: tl.constexpr,
):
    """One block of routes a program; the counts of `READ` blocks a step."""
    e = tl.arange(0, EP)
    every = tl.zeros((READ, EP), tl.int32)
    earlier = tl.zeros((READ, EP), tl.int32)
    for first in range(0, blocks, READ):
        block = first + tl.arange(0, READ)
        at = counts + block.to(tl.int64)[:, None] * EP + e[None, :]
        part = tl.load(at, mask=(block < blocks)[:, None], other=0)
        every += part
        earlier += tl.where((block < tl.program_id(0))[:, None], part, 0)
    total, before = tl.sum(every, 0), tl.sum(earlier, 0)
    ends = tl.cumsum(total, 0)
    if tl.program_id(0) == 0:
        tl.store(offsets + e, ends, mask=e < E)
    here = tl.load(counts + tl.program_id(0).to(tl.int64) * EP + e, mask=blocks > 0, other=0)
    # What a route's place among the sorted ones of its block lacks to its row.
    shift = ends - total + before - (tl.cumsum(here, 0) - here)
    first = tl.program_id(0) * BLOCK
    place = tl.arange(0, BLOCK)
    expert = tl.load(ids + first + place, mask=first + place < N, other=-1)
    routed = (expert >= 0) & (expert < E)
    ordered = tl.sort(tl.where(routed, expert, EP).to(tl.int32) * BLOCK + place)
    expert = ordered // BLOCK
    route = first + ordered % BLOCK
    routed = expert < EP
    row = place + tl.gather(shift, tl.minimum(expert, EP - 1), 0)
    tl.store(route_of + row, route, mask=routed)
    tl.store(row_of + route, tl.where(routed, row, -1), mask=route < N)
