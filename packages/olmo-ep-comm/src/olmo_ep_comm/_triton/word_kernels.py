# pyright: reportArgumentType=false, reportCallIssue=false
"""Words: what each row is, kept for the way home, and values of rows, written into peers.

`peers` are int64 addresses of the buffers of all ranks.
"""

import triton
import triton.language as tl


@triton.jit
def take_meta_kernel(meta, out, weights, num_rows, BLOCK: tl.constexpr):
    """A block of rows a program: the four words of each, and the last of them by itself."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < tl.load(num_rows)
    word = row[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out + word, tl.load(meta + word, mask=inside[:, None]), mask=inside[:, None])
    tl.store(weights + row, tl.load(meta + row * 4 + 3, mask=inside), mask=inside)


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
