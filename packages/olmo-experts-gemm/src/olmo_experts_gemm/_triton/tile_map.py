# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""The row tiles of all experts, listed on the device.

Expert e has `ceil(count_e / rows)` tiles of rows, none when it has no rows, and no tile holds rows
of two experts. The list is as long as the batch could need, `ceil(R / rows) + E`, so the host knows
its size without knowing the counts; the number of tiles in use lies on the device beside it.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128


class TileMap(NamedTuple):
    """Where each row tile begins and whose it is."""

    expert: Tensor
    """(capacity,) int32."""
    row: Tensor
    """The first row, (capacity,) int32."""
    end: Tensor
    """Where the rows of the expert end, (capacity,) int32."""
    used: Tensor
    """How many tiles are in use, (1,) int32."""


def make_tile_map(offsets_E: Tensor, num_rows: int, rows: int) -> TileMap:
    """List the tiles of `rows` rows of the experts that end at `offsets_E`.

    Ends that decrease or lie past `num_rows` fail an assertion on the device, and no tile reaches
    past `num_rows` in any case.
    """
    E = offsets_E.shape[0]
    capacity = triton.cdiv(num_rows, rows) + E
    made = offsets_E.new_empty(3 * capacity + 1)
    tiles = TileMap(*made.split([capacity, capacity, capacity, 1]))
    _tile_map_kernel[(triton.cdiv(capacity, _BLOCK),)](
        offsets_E,
        *tiles,
        capacity,
        num_rows,
        E,
        rows,
        triton.next_power_of_2(E),
        _BLOCK,
        debug=True,  # keeps the assertion
        sanitize_overflow=False,
    )
    return tiles


@triton.jit
def _tile_map_kernel(
    offsets,
    tile_expert,
    tile_row,
    tile_end,
    tile_count,
    capacity,
    R,
    E,
    ROWS: tl.constexpr,
    EP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a block of tiles; each finds the expert of its tiles among all ends."""
    e = tl.arange(0, EP)
    end = tl.load(offsets + e, mask=e < E, other=0)
    start = tl.load(offsets + e - 1, mask=(e > 0) & (e < E), other=0)
    legal = (e >= E) | ((start <= end) & (end <= R))
    tl.device_assert(legal, "`offsets_E` must not decrease, from 0 to at most the number of rows")
    end = tl.minimum(end, R)
    start = tl.minimum(tl.maximum(start, 0), end)
    tiles = tl.where(e < E, (end - start + ROWS - 1) // ROWS, 0)
    ends = tl.cumsum(tiles, 0)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
    mine = expert[:, None] == e[None, :]
    first = tl.sum(tl.where(mine, (ends - tiles)[None, :], 0), 1)
    begin = tl.sum(tl.where(mine, start[None, :], 0), 1)
    stop = tl.sum(tl.where(mine, end[None, :], 0), 1)
    used = tile < tl.sum(tiles, 0)
    mask = tile < capacity
    tl.store(tile_expert + tile, tl.where(used, expert, 0), mask=mask)
    tl.store(tile_row + tile, tl.where(used, begin + (tile - first) * ROWS, 0), mask=mask)
    tl.store(tile_end + tile, tl.where(used, stop, 0), mask=mask)
    if tl.program_id(0) == 0:
        tl.store(tile_count, tl.minimum(tl.sum(tiles, 0), capacity))


@triton.jit
def tile_at(number, down, across, GROUP: tl.constexpr):
    """The row and the column of a tile; `GROUP` tiles down a column are neighbours."""
    band = GROUP * across
    first = number // band * GROUP
    height = tl.minimum(down - first, GROUP)
    within = number % band
    return first + within % height, within // height
