# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""The tiles of rows of all experts, listed on the device, and the order in which they are computed.

Expert e has `ceil(rows of e / height)` tiles; none holds rows of two experts. The host does not
know the rows of an expert, but it knows a bound on all tiles together, `ceil(R / height) + E`: the
list has that capacity, and how much of it is in use lies on the device behind it.
"""

import triton
import triton.language as tl
from torch import Tensor

_EACH = 128  # tiles a program


def list_tiles(offsets_E: Tensor, num_rows: int, height: int) -> tuple[Tensor, int]:
    """List the tiles of `height` rows of the experts that end at `offsets_E`.

    Returns:
        int32, `(2 capacity + 1,)`: the expert of each tile, its first row, and the number in use;
        and the capacity. Ends that decrease or pass `num_rows` fail an assertion on the device, and
        even so no tile begins past `num_rows`.
    """
    E = offsets_E.numel()
    capacity = -(-num_rows // height) + E
    tiles = offsets_E.new_empty(2 * capacity + 1)
    _list_tiles_kernel[(triton.cdiv(capacity, _EACH),)](
        offsets_E,
        tiles,
        capacity,
        num_rows,
        E,
        HEIGHT=height,
        EXPERTS=triton.next_power_of_2(E),
        EACH=_EACH,
        debug=True,  # or the assertion is compiled away
        sanitize_overflow=False,
    )
    return tiles, capacity


@triton.jit
def _list_tiles_kernel(
    offsets,
    tiles,
    capacity,
    R,
    E,
    HEIGHT: tl.constexpr,
    EXPERTS: tl.constexpr,
    EACH: tl.constexpr,
):
    """`EACH` tiles a program, which looks up the expert of each among all ends."""
    e = tl.arange(0, EXPERTS)
    end = tl.load(offsets + e, mask=e < E, other=0)
    start = tl.load(offsets + e - 1, mask=(e > 0) & (e < E), other=0)
    in_order = (e >= E) | ((start >= 0) & (start <= end) & (end <= R))
    tl.device_assert(in_order, "`offsets_E` must ascend from at least 0 to at most the rows")
    # An expert's tiles are numbered up to `last`.
    end = tl.minimum(end, R)
    start = tl.minimum(tl.maximum(start, 0), end)
    count = tl.where(e < E, tl.cdiv(end - start, HEIGHT), 0)
    last = tl.cumsum(count, 0)
    total = tl.minimum(tl.sum(count, 0), capacity)
    tile = tl.program_id(0) * EACH + tl.arange(0, EACH)
    owner = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), 1)
    owned = owner[:, None] == e[None, :]
    # The first row of tile t is `start + (t - first tile) * HEIGHT`, for the owner alone.
    shift = start - (last - count) * HEIGHT
    row = tl.sum(tl.where(owned, shift[None, :], 0), 1) + tile * HEIGHT
    used = tile < total
    tl.store(tiles + tile, tl.where(used, owner, 0), mask=tile < capacity)
    tl.store(tiles + capacity + tile, tl.where(used, row, 0), mask=tile < capacity)
    if tl.program_id(0) == 0:
        tl.store(tiles + 2 * capacity, total)


@triton.jit
def place_of(number, down, across, GROUP: tl.constexpr):
    """The place (row of tiles, column of tiles) of the tile that is computed as `number`-th.

    Columns are walked in bands of `GROUP` tiles down, so that tiles of one time share weights.
    """
    band = number // (GROUP * across)
    height = tl.minimum(down - band * GROUP, GROUP)
    inside = number - band * (GROUP * across)
    return band * GROUP + inside % height, inside // height
