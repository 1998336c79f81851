"""What is measured by the number of programs that share the rows."""

from collections.abc import Callable, Iterator

import timing
import torch
from cells import Cell, Shape, make_inputs, make_rowwise, rows_away
from olmo_ep_comm._rowwise import impl

LINK = (16, 32, 64, 132, 264, 528)
LOCAL = (264, 528, 1056, 2112)


def over_the_link(shape: Shape, device: torch.device, repeats: int) -> Iterator[Cell]:
    """Time row writes and sums that are fetched, and a matrix product beside the writes."""
    moves = impl.pick_moves("auto", device)
    dispatcher = make_rowwise(shape, torch.bfloat16)
    inputs = make_inputs(shape, device, torch.bfloat16)
    buffers = dispatcher._buffers
    with torch.no_grad():
        sent = dispatcher.dispatch(*inputs)
        dispatcher.combine(sent.rows_RD, sent.handle)  # the sums lie ready to be fetched
    plan = sent.handle.exchange.inner.plans[0]
    words_TW = inputs[0].view(torch.int32)
    _, once = rows_away(inputs[1], shape)
    wire = once * shape.D * 2
    side = torch.cuda.Stream()
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    alone = timing.interleave({"product alone": lambda: a @ a}, repeats, device)

    def put() -> None:
        moves.put_rows(buffers.rows, buffers.first_R, words_TW, plan)

    def get() -> None:
        moves.get_sums(buffers.sums, plan, buffers.settings.form)

    def put_beside() -> None:
        with torch.cuda.stream(side):
            for _ in range(8):
                put()

    defaults = moves.LINK_PROGRAMS, moves.FETCH_PROGRAMS
    for number in LINK:
        moves.LINK_PROGRAMS = moves.FETCH_PROGRAMS = number
        names = (f"rows, {number} programs", f"sums fetched, {number} programs")
        samples = timing.interleave({names[0]: put, names[1]: get}, repeats, device)
        beside = {f"product beside {number}": lambda: a @ a}
        samples |= timing.interleave(beside, repeats, device, before=put_beside)
        torch.cuda.synchronize()
        wires = dict.fromkeys(names, wire)
        yield Cell(f"{shape}: {number} programs", samples | alone, wires, 0)
    moves.LINK_PROGRAMS, moves.FETCH_PROGRAMS = defaults


def in_own_memory(shape: Shape, device: torch.device, repeats: int) -> Iterator[Cell]:
    """Time what stays on a rank: rows copied along chains, and chains added for a fetch."""
    moves = impl.pick_moves("auto", device)
    dispatcher = make_rowwise(shape, torch.bfloat16)
    with torch.no_grad():
        sent = dispatcher.dispatch(*make_inputs(shape, device, torch.bfloat16))
    exchange = sent.handle.exchange.inner
    buffers, meta_C4, num_rows = dispatcher._buffers, exchange._meta[0], exchange._num_rows[0]
    words_CW = buffers.rows.buffers[0].own[0]
    calls: dict[str, Callable[[], object]] = {
        "fan out": lambda: moves.fan_out(words_CW, words_CW, meta_C4, num_rows),
        "keep sums": lambda: moves.keep_sums(buffers.sums.own[0], sent.rows_RD, meta_C4, num_rows),
    }
    default = moves.LOCAL_PROGRAMS
    for number in LOCAL:
        moves.LOCAL_PROGRAMS = number
        named = {f"{name}, {number} programs": call for name, call in calls.items()}
        samples = timing.interleave(named, repeats, device)
        yield Cell(f"{shape}: {number} programs in own memory", samples, {}, 0)
    moves.LOCAL_PROGRAMS = default
