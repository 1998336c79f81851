# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""The order of the routes by (expert, token, slot): a stable counting sort without atomics.

Each program counts the experts in its block of routes. Then each program adds up, for every expert,
the counts of the blocks before its own and of all blocks, sorts the routes of its block by (expert,
route), and places them: a route's row is its expert's first row, the routes of that expert in the
blocks before, and those before it in its block, which are the sorted ones between the first of that
expert and itself. The result does not depend on the size of a block. The tiles of all experts are
listed by a kernel of their own.

Shapes: N = T * K routes, E experts (EP the next power of two), R = N + E (align - 1) rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 256
"""Blocks of routes that are sorted at the same time, within 64 to 1024 routes a block."""
_TABLE = 2**13
"""Blocks, or tiles, times experts of which a program holds a table: twice as many spill."""


def plan_rows(expert_ids_TK: Tensor, num_experts: int, align: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `offsets_E` int32, `rows_TK` and `routes_R` int64, as `reference.plan_rows`."""
    ids = expert_ids_TK.contiguous()
    N, E = ids.numel(), num_experts
    EP = max(2, triton.next_power_of_2(E))
    block = max(64, min(1024, triton.next_power_of_2(triton.cdiv(N, _PROGRAMS))))
    blocks = triton.cdiv(N, block)
    capacity = N + E * (align - 1)
    counts = torch.empty(blocks * EP, dtype=torch.int32, device=ids.device)
    offsets_E = torch.empty(E, dtype=torch.int32, device=ids.device)
    rows_TK = torch.empty_like(ids)
    routes_R = torch.empty(capacity, dtype=torch.int64, device=ids.device)
    programs = triton.cdiv(max(capacity, 1), block)
    # An id out of range fails an assertion on the device, which the option `debug` keeps in.
    _count_kernel[(programs,)](
        ids,
        counts,
        routes_R,
        N,
        E,
        blocks,
        capacity,
        EP=EP,
        BLOCK=block,
        num_warps=4,
        debug=True,
        sanitize_overflow=False,
    )
    _place_kernel[(max(blocks, 1),)](
        ids,
        counts,
        offsets_E,
        rows_TK,
        routes_R,
        N,
        E,
        blocks,
        ALIGN=align,
        EP=EP,
        BLOCK=block,
        READ=max(4, min(64, _TABLE // EP)),
        num_warps=8 if block == 1024 else 4,
    )
    return offsets_E, rows_TK, routes_R


def plan_tiles(offsets_E: Tensor, num_rows: int, height: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `experts_C`, `starts_C` and `num_tiles`, as `reference.plan_tiles`."""
    E = offsets_E.numel()
    capacity = triton.cdiv(num_rows, height) + E
    experts_C, starts_C = offsets_E.new_empty(capacity), offsets_E.new_empty(capacity)
    num_tiles = offsets_E.new_empty(())
    EP = max(2, triton.next_power_of_2(E))
    tiles = max(1, min(128, _TABLE // EP))
    _tile_kernel[(triton.cdiv(capacity, tiles),)](
        offsets_E,
        experts_C,
        starts_C,
        num_tiles,
        capacity,
        E,
        height,
        EP=EP,
        TILES=tiles,
        num_warps=8,
    )
    return experts_C, starts_C, num_tiles


@triton.jit
def _count_kernel(
    ids, counts, routes, N, E, blocks, capacity, EP: tl.constexpr, BLOCK: tl.constexpr
):
    """One block of routes a program, and of rows, in which there is no route yet."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(routes + index, tl.full((BLOCK,), -1, tl.int64), mask=index < capacity)
    if tl.program_id(0) < blocks:
        id_of = tl.load(ids + index, mask=index < N, other=-1)
        tl.device_assert(
            (id_of >= -1) & (id_of < E), "`expert_ids_TK` must be in [-1, `num_experts`)"
        )
        routed = (id_of >= 0) & (id_of < E)
        count = tl.histogram(tl.where(routed, id_of, 0).to(tl.int32), EP, mask=routed)
        tl.store(counts + tl.program_id(0).to(tl.int64) * EP + tl.arange(0, EP), count)


@triton.jit
def _place_kernel(
    ids,
    counts,
    offsets,
    rows,
    routes,
    N,
    E,
    blocks,
    ALIGN: tl.constexpr,
    EP: tl.constexpr,
    BLOCK: tl.constexpr,
    READ: tl.constexpr,
):
    """One block of routes a program."""
    expert = tl.arange(0, EP)
    every = tl.zeros((READ, EP), tl.int32)
    earlier = tl.zeros((READ, EP), tl.int32)
    for first in range(0, blocks, READ):
        block = first + tl.arange(0, READ)
        at = block.to(tl.int64)[:, None] * EP + expert[None, :]
        part = tl.load(counts + at, mask=(block < blocks)[:, None], other=0)
        every += part
        earlier += tl.where((block < tl.program_id(0))[:, None], part, 0)
    total, before = tl.sum(every, 0), tl.sum(earlier, 0)
    padded = (total + ALIGN - 1) // ALIGN * ALIGN
    ends = tl.cumsum(padded, 0)
    if tl.program_id(0) == 0:
        tl.store(offsets + expert, ends, mask=expert < E)
    if blocks == 0:
        return
    here = tl.load(counts + tl.program_id(0).to(tl.int64) * EP + expert)
    # What a route's place among the sorted ones of its block lacks to its row.
    shift = ends - padded + before - (tl.cumsum(here, 0) - here)
    first = tl.program_id(0) * BLOCK
    place = tl.arange(0, BLOCK)
    id_of = tl.load(ids + first + place, mask=first + place < N, other=-1)
    routed = (id_of >= 0) & (id_of < E)
    ordered = tl.sort(tl.where(routed, id_of, EP).to(tl.int32) * BLOCK + place)
    id_of = ordered // BLOCK
    route = first + ordered % BLOCK
    routed = id_of < EP
    row = place + tl.gather(shift, tl.minimum(id_of, EP - 1), 0)
    tl.store(routes + row, route.to(tl.int64), mask=routed)
    tl.store(rows + route, tl.where(routed, row, -1).to(tl.int64), mask=route < N)


@triton.jit
def _tile_kernel(
    offsets, experts, starts, count, capacity, E, height, EP: tl.constexpr, TILES: tl.constexpr
):
    """`TILES` tiles a program; each finds its expert among the ends of all experts' tiles."""
    expert = tl.arange(0, EP)
    end = tl.load(offsets + expert, mask=expert < E, other=0)
    start = tl.load(offsets + expert - 1, mask=(expert > 0) & (expert < E), other=0)
    tiles = tl.where(expert < E, (end - start + height - 1) // height, 0)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    owner = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
    mine = owner[:, None] == expert[None, :]
    begin = tl.sum(tl.where(mine, (start - (ends - tiles) * height)[None, :], 0), 1)
    used = tile < total
    keep = tile < capacity
    tl.store(experts + tile, tl.where(used, owner, -1), mask=keep)
    tl.store(starts + tile, tl.where(used, begin + tile * height, -1), mask=keep)
    if tl.program_id(0) == 0:
        tl.store(count, total)
