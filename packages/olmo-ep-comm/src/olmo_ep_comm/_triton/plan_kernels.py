# pyright: reportArgumentType=false, reportCallIssue=false
"""The plan of `olmo_ep_comm._rowwise.plan` in four kernels, two on each side of a barrier.

    count          a block of routes: its histogram over the experts
    put_counts     an expert: its blocks summed up, the sum written into every rank
    place_experts  a destination rank: where the rows of this rank's routes to each expert begin
    put_plan       a block of routes: row, chain and place of the sum of each, written to its rank

A block is the routes of some whole tokens. The place of a route among those of its rank to the same
expert is the sum over the blocks before, plus the routes before it in its block that go there too,
counted pair by pair: no order of execution enters, and no atomics. Expert ids are compared in their
own width before they become 32 bits.

A row of counts is E counts, the number of ids that are no expert's, and a lease.

Numbers that change from call to call are not specialised: see `row_kernels`.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_routes", "num_blocks"])
def count_kernel(
    ids,
    blocks,
    num_routes,
    num_blocks,
    E: tl.constexpr,
    ROUTES: tl.constexpr,
    LANES: tl.constexpr,
    BINS: tl.constexpr,
):
    """A block of routes a program: column `block` of (E + 1, blocks), the last row unknown ids."""
    block = tl.program_id(0)
    lane = tl.arange(0, LANES)
    route = block * ROUTES + lane
    expert = tl.load(ids + route, mask=(lane < ROUTES) & (route < num_routes), other=-1)
    is_expert = (expert >= 0) & (expert < E)
    unknown = tl.where(expert == -1, E + 1, E)  # the bin past the rows is that of no route
    histogram = tl.histogram(tl.where(is_expert, expert, unknown).to(tl.int32), BINS)
    bins = tl.arange(0, BINS)
    tl.store(blocks + bins.to(tl.int64) * num_blocks + block, histogram, mask=bins <= E)


@triton.jit(do_not_specialize=["num_blocks", "rank", "lease"])
def put_counts_kernel(
    blocks,
    peers,
    num_blocks,
    rank,
    lease,
    E: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """An expert a program: its counts become sums over the blocks before, the total goes out.

    Expert E stands for the unknown ids, and its program also writes the lease.
    """
    expert = tl.program_id(0)
    own = blocks + expert.to(tl.int64) * num_blocks
    lane = tl.arange(0, BLOCKS)
    total = tl.zeros((), tl.int32)
    first = 0
    while first < num_blocks:
        inside = first + lane < num_blocks
        count = tl.load(own + first + lane, mask=inside, other=0)
        tl.store(own + first + lane, total + tl.cumsum(count, 0) - count, mask=inside)
        total += tl.sum(count, 0)
        first += BLOCKS
    peer = tl.arange(0, RANKS)
    base = tl.load(peers + peer, mask=peer < NUM_RANKS, other=0)
    row = base.to(tl.pointer_type(tl.int32), bitcast=True) + rank * (E + 2)
    tl.store(row + expert, tl.zeros((RANKS,), tl.int32) + total, mask=peer < NUM_RANKS)
    is_last = (peer < NUM_RANKS) & (expert == E)
    tl.store(row + (E + 1), tl.zeros((RANKS,), tl.int32) + lease, mask=is_last)


@triton.jit(do_not_specialize=["rank", "capacity"])
def place_experts_kernel(
    counts,
    admitted,
    first,
    kept,
    ends,
    is_sound,
    rank,
    capacity,
    E: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    IS_LIMITED: tl.constexpr,
):
    """A destination rank a program: its rows by expert, then source, cut at the capacity.

    Of them this rank, as a source, learns its first row and its rows for each expert; as the
    destination it learns the ends of its experts, and whether any rank found an unknown id.
    """
    destination = tl.program_id(0)
    place = tl.arange(0, LANES)
    inside = place < E
    source = place % NUM_RANKS
    local = place // NUM_RANKS
    expert = destination * (E // NUM_RANKS) + local
    count = tl.load(counts + source * (E + 2) + expert, mask=inside, other=0)
    if IS_LIMITED:
        allowed = tl.load(admitted + source * E + expert, mask=inside, other=0)
        count = tl.minimum(tl.maximum(allowed, 0), count.to(tl.int64)).to(tl.int32)
    running = tl.cumsum(count, 0)
    start = tl.minimum(running - count, capacity)
    end = tl.minimum(running, capacity)
    is_own = inside & (source == rank)
    tl.store(first + expert, start, mask=is_own)
    tl.store(kept + expert, end - start, mask=is_own)
    is_here = inside & (destination == rank)
    tl.store(ends + local, end, mask=is_here & (source == NUM_RANKS - 1))
    if destination == rank:
        other = tl.arange(0, RANKS)
        faults = tl.load(counts + other * (E + 2) + E, mask=other < NUM_RANKS, other=0)
        tl.store(is_sound, (tl.max(faults, 0) == 0).to(tl.uint8))


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "rank", "first_route"])
def put_plan_kernel(
    peers,
    ids,
    weights,
    counts,
    blocks,
    first,
    kept,
    ranks,
    rows,
    following,
    sums,
    num_sums,
    num_dropped,
    num_tokens,
    num_blocks,
    rank,
    first_route,
    E: tl.constexpr,
    SHARE: tl.constexpr,
    SUMS: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
):
    """A block of routes a program: the plan of each, and four words for the row of each."""
    block = tl.program_id(0)
    token = block * TOKENS + tl.arange(0, TOKENS)[:, None]
    slot = tl.arange(0, SLOTS)[None, :]
    inside = (token < num_tokens) & (slot < K)
    route = token * K + slot
    expert = tl.load(ids + route, mask=inside, other=-1)
    is_route = (expert >= 0) & (expert < E)
    expert = tl.where(is_route, expert, 0).to(tl.int32)
    place = tl.load(blocks + expert.to(tl.int64) * num_blocks + block, mask=is_route, other=0)
    for start in range(0, TOKENS * K, CHUNK):
        lane = start + tl.arange(0, CHUNK)
        other = block * (TOKENS * K) + lane
        there = (lane < TOKENS * K) & (other < num_tokens * K)
        theirs = tl.load(ids + other, mask=there, other=-1)
        theirs = tl.where((theirs >= 0) & (theirs < E), theirs, -1).to(tl.int32)
        before = other[None, None, :] < route[:, :, None]
        same = theirs[None, None, :] == expert[:, :, None]
        place += tl.sum((before & same).to(tl.int32), 2)

    is_kept = is_route & (place < tl.load(kept + expert, mask=is_route, other=0))
    row = tl.where(is_kept, tl.load(first + expert, mask=is_route, other=0) + place, -1)
    destination = tl.where(is_kept, expert // SHARE, -1)
    shared = (destination[:, :, None] == destination[:, None, :]) & is_kept[:, :, None]
    later = shared & (slot[:, None, :] > slot[:, :, None])
    earlier = shared & (slot[:, None, :] < slot[:, :, None])
    # The least key is that of the next slot, and its lower half is the row there.
    key = (slot.to(tl.int64) * 4294967296 + row.to(tl.int64))[:, None, :]
    none = SLOTS * 4294967296
    key = tl.min(tl.where(later, key, none), 2)
    next_row = tl.where(key == none, -1, key & 4294967295).to(tl.int32)
    is_head = is_kept & (tl.max(earlier.to(tl.int32), 2) == 0)
    place_of_sum = token * SUMS + tl.cumsum(is_head.to(tl.int32), 1) - 1
    place_of_sum = tl.where(is_head, place_of_sum, -1)

    tl.store(ranks + route, destination, mask=inside)
    tl.store(rows + route, row, mask=inside)
    tl.store(following + route, next_row, mask=inside)
    tl.store(sums + route, place_of_sum, mask=inside)
    one_token = block * TOKENS + tl.arange(0, TOKENS)
    heads = tl.sum(is_head.to(tl.int32), 1)
    tl.store(num_sums + one_token, heads, mask=one_token < num_tokens)

    weight = tl.load(weights + route, mask=is_kept, other=0)
    words = tl.join(tl.join(next_row, place_of_sum), tl.join(first_route + route, weight))
    words = tl.reshape(words, (TOKENS, SLOTS, 4))  # next row, route, place of the sum, weight
    base = tl.load(peers + destination, mask=is_kept, other=0) + row.to(tl.int64) * 16
    target = base.to(tl.pointer_type(tl.int32), bitcast=True)
    target = tl.multiple_of(target, (16, 16))[:, :, None] + tl.arange(0, 4)[None, None, :]
    tl.store(target, words, mask=is_kept[:, :, None])

    if block == 0:
        column = tl.arange(0, LANES)
        asked = tl.load(counts + rank * (E + 2) + column, mask=column < E, other=0)
        found = tl.load(kept + column, mask=column < E, other=0)
        tl.store(num_dropped, tl.sum((asked - found).to(tl.int64), 0))
