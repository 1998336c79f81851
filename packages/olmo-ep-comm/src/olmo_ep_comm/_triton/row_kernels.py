# pyright: reportArgumentType=false, reportCallIssue=false
"""Whole rows: written once into each rank, copied along chains, added along chains, added at home.

Every kernel is a fixed number of programs P that share the rows (program p takes p, p + P, ...), so
that a caller decides how many multiprocessors the exchange may take. Addresses are computed in 64
bits. Rows are moved in blocks of columns; a mask ends the last one. Sums are carried in float32.

`peers` are int64 addresses of the buffers of all ranks, the same address space for a rank of this
process and for one behind a link. Rows and buffers start at multiples of 16 bytes, which
`checks.make_form` sees to and `multiple_of`, in bytes, says to the compiler: an address that was
loaded is unknown.

Numbers that change from call to call are not specialised: a kernel must not be compiled anew while
a CUDA graph is captured, or by one rank while the others wait.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens", "num_ranks", "lease_stride"])
def put_rows_kernel(
    peers,
    leases,
    words,
    ranks,
    rows,
    sums,
    num_tokens,
    num_ranks,
    lease_stride,
    W: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tokens: each is read once and written to the heads of its routes.

    Buffer `leases[q * lease_stride]` of rank q is the one with the address `peers[lease, q]`. The
    places of all slots are looked up at once, so that no store waits for them after the first.
    """
    slot = tl.arange(0, SLOTS)
    token = tl.program_id(0).to(tl.int64)
    while token < num_tokens:
        route = token * K + slot
        is_head = tl.load(sums + route, mask=slot < K, other=-1) >= 0
        rank = tl.maximum(tl.load(ranks + route, mask=slot < K, other=0), 0)
        row = tl.load(rows + route, mask=slot < K, other=0).to(tl.int64)
        lease = tl.load(leases + rank * lease_stride).to(tl.int64)
        address = tl.load(peers + lease * num_ranks + rank)
        target = tl.multiple_of(address.to(tl.pointer_type(tl.int32)) + row * W, 16)
        for first in range(0, W, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < W
            value = tl.load(words + token * W + column, mask=inside)
            at = target[:, None] + column[None, :]
            there = is_head[:, None] & inside[None, :]
            tl.store(at, tl.broadcast_to(value[None, :], (SLOTS, BLOCK)), mask=there)
        token += tl.num_programs(0)


@triton.jit
def fan_out_kernel(
    words, out, meta, num_rows, W: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows: a head is read once and written to the rows of its chain."""
    row = tl.program_id(0).to(tl.int64)
    last = tl.load(num_rows)
    while row < last:
        if tl.load(meta + row * 4 + 2) >= 0:
            for first in range(0, W, BLOCK):
                column = first + tl.arange(0, BLOCK)
                inside = column < W
                value = tl.load(words + row * W + column, mask=inside)
                if not IN_PLACE:
                    tl.store(out + row * W + column, value, mask=inside)
                following = tl.load(meta + row * 4).to(tl.int64)
                while following >= 0:
                    tl.store(out + following * W + column, value, mask=inside)
                    following = tl.load(meta + following * 4).to(tl.int64)
        row += tl.num_programs(0)


@triton.jit(do_not_specialize=["slots_a_rank"])
def put_sums_kernel(peers, y, meta, num_rows, slots_a_rank, D: tl.constexpr, BLOCK: tl.constexpr):
    """Rows: a head adds its chain and writes the sum to its token's rank."""
    row = tl.program_id(0).to(tl.int64)
    last = tl.load(num_rows)
    while row < last:
        place = tl.load(meta + row * 4 + 2).to(tl.int64)
        if place >= 0:
            source = tl.load(meta + row * 4 + 1) // slots_a_rank
            address = tl.load(peers + source)
            target = address.to(tl.pointer_type(y.dtype.element_ty)) + place * D
            target = tl.multiple_of(target, 16)
            for first in range(0, D, BLOCK):
                column = first + tl.arange(0, BLOCK)
                inside = column < D
                total = tl.load(y + row * D + column, mask=inside).to(tl.float32)
                following = tl.load(meta + row * 4).to(tl.int64)
                while following >= 0:
                    total += tl.load(y + following * D + column, mask=inside).to(tl.float32)
                    following = tl.load(meta + following * 4).to(tl.int64)
                tl.store(target + column, total.to(y.dtype.element_ty), mask=inside)
        row += tl.num_programs(0)


@triton.jit
def keep_sums_kernel(sums, y, meta, num_rows, D: tl.constexpr, BLOCK: tl.constexpr):
    """Rows: a head adds its chain and keeps the sum in its own place."""
    row = tl.program_id(0).to(tl.int64)
    last = tl.load(num_rows)
    while row < last:
        if tl.load(meta + row * 4 + 2) >= 0:
            for first in range(0, D, BLOCK):
                column = first + tl.arange(0, BLOCK)
                inside = column < D
                total = tl.load(y + row * D + column, mask=inside).to(tl.float32)
                following = tl.load(meta + row * 4).to(tl.int64)
                while following >= 0:
                    total += tl.load(y + following * D + column, mask=inside).to(tl.float32)
                    following = tl.load(meta + following * 4).to(tl.int64)
                tl.store(sums + row * D + column, total.to(y.dtype.element_ty), mask=inside)
        row += tl.num_programs(0)


@triton.jit(do_not_specialize=["num_tokens"])
def get_sums_kernel(
    peers,
    ranks,
    rows,
    sums,
    out,
    num_tokens,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tokens: the sums at the heads of its routes, fetched in the order of their slots."""
    token = tl.program_id(0).to(tl.int64)
    while token < num_tokens:
        for first in range(0, D, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < D
            total = tl.zeros((BLOCK,), tl.float32)
            for slot in tl.static_range(K):  # unrolled, so that the loads overlap
                route = token * K + slot
                is_head = tl.load(sums + route) >= 0
                address = tl.load(peers + tl.load(ranks + route), mask=is_head, other=0)
                row = tl.load(rows + route).to(tl.int64)
                source = address.to(tl.pointer_type(out.dtype.element_ty)) + row * D
                at = tl.multiple_of(source, 16) + column
                total += tl.load(at, mask=inside & is_head, other=0.0).to(tl.float32)
            tl.store(out + token * D + column, total.to(out.dtype.element_ty), mask=inside)
        token += tl.num_programs(0)


@triton.jit(do_not_specialize=["num_tokens"])
def add_sums_kernel(
    sums, num_sums, out, num_tokens, F: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Tokens: the sums that arrived, in the order of their slots."""
    token = tl.program_id(0).to(tl.int64)
    while token < num_tokens:
        count = tl.load(num_sums + token)
        for first in range(0, D, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < D
            total = tl.zeros((BLOCK,), tl.float32)
            for place in range(F):
                there = inside & (place < count)
                at = sums + (token * F + place) * D + column
                total += tl.load(at, mask=there, other=0.0).to(tl.float32)
            tl.store(out + token * D + column, total.to(out.dtype.element_ty), mask=inside)
        token += tl.num_programs(0)
