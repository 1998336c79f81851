# pyright: reportArgumentType=false, reportCallIssue=false
"""Words: the counts of a rank, what each row is, and values of rows, written into peers.

`peers` are int64 addresses of the buffers of all ranks.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["lease", "rank"])
def put_counts_kernel(peers, counts, lease, rank, E: tl.constexpr, BLOCK: tl.constexpr):
    """One peer a program: its row `rank` gets the counts of all experts and the lease."""
    peer = tl.load(peers + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    column = tl.arange(0, BLOCK)
    value = tl.load(counts + column, mask=column < E)
    value = tl.where(column == E, lease, value)
    tl.store(peer + rank * (E + 1) + column, value, mask=column <= E)


@triton.jit(do_not_specialize=["num_routes", "first_route"])
def put_meta_kernel(
    peers, ranks, rows, following, sums, weights, num_routes, first_route, BLOCK: tl.constexpr
):
    """A block of routes a program: four words for the row of each that is kept."""
    route = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = route < num_routes
    row = tl.load(rows + route, mask=inside, other=-1)
    kept = row >= 0
    rank = tl.load(ranks + route, mask=kept, other=0)
    base = tl.load(peers + rank, mask=kept, other=0)
    target = (base + row.to(tl.int64) * 16).to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(target, tl.load(following + route, mask=kept), mask=kept)
    tl.store(target + 1, first_route + route, mask=kept)
    tl.store(target + 2, tl.load(sums + route, mask=kept), mask=kept)
    tl.store(target + 3, tl.load(weights + route, mask=kept), mask=kept)


@triton.jit(do_not_specialize=["slots_a_rank"])
def put_values_kernel(peers, values, meta, num_rows, slots_a_rank, BLOCK: tl.constexpr):
    """A block of rows a program: the value of each goes to the slot that its route came from."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < tl.load(num_rows)
    route = tl.load(meta + row * 4 + 1, mask=inside, other=0)
    source = route // slots_a_rank
    base = tl.load(peers + source, mask=inside, other=0)
    slot = route - source * slots_a_rank
    target = (base + slot.to(tl.int64) * 4).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(target, tl.load(values + row, mask=inside), mask=inside)
