"""What is measured by the number of programs that share the rows.

Rows move beside the grouped product of the experts, whose multiprocessors they may take.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterator

import timing
import torch
from cells import Cell, Shape, make_inputs, make_rowwise, rows_away
from olmo_ep_comm._rowwise import impl
from torch import Tensor

LINK = (16, 32, 64, 132, 264, 528)
LOCAL = (264, 528, 1056, 2112)
# Writes beside a product last this many times as long as the product alone.
_OUTLAST = 2


def grouped_product(shape: Shape, device: torch.device) -> Callable[[], Tensor]:
    """Return a call of the product of all routes' rows with their experts' weights, bfloat16.

    T * K rows of width D by expert, as uniform routes share them out among E experts, each with a
    weight (D, D / 2): at a width of 4096 as many operations as the gate of experts of 2048 takes.
    """
    _, ids, _ = make_inputs(shape, device, torch.bfloat16)
    counts_E = torch.bincount(ids.flatten(), minlength=shape.E)
    offsets_E = counts_E.cumsum(0, dtype=torch.int32)
    generator = torch.Generator(device).manual_seed(0)
    size = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    rows_RD = torch.randn(shape.T * shape.K, shape.D, **size)
    w_EFD = torch.randn(shape.E, shape.D // 2, shape.D, **size)
    return lambda: torch.nn.functional.grouped_mm(rows_RD, w_EFD.mT, offs=offsets_E)


def product_alone(shape: Shape, device: torch.device, repeats: int) -> Iterator[Cell]:
    """Time the grouped product with nothing beside it."""
    calls = {"grouped product alone": grouped_product(shape, device)}
    yield Cell(f"{shape}: alone", timing.interleave(calls, repeats, device), {}, 0)


def over_the_link(shape: Shape, device: torch.device, repeats: int) -> Iterator[Cell]:
    """Time row writes and sums that are fetched, and a grouped product beside the writes."""
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
    product = grouped_product(shape, device)
    alone = timing.interleave({"grouped product alone": product}, repeats, device)
    needed = _OUTLAST * statistics.median(alone["grouped product alone"])

    def put() -> None:
        moves.put_rows(buffers.rows, buffers.first_R, words_TW, plan)

    def get() -> None:
        moves.get_sums(buffers.sums, plan, buffers.settings.form)

    def put_beside(count: int) -> None:
        with torch.cuda.stream(side):
            for _ in range(count):
                put()

    defaults = moves.LINK_PROGRAMS, moves.FETCH_PROGRAMS
    for number in LINK:
        moves.LINK_PROGRAMS = moves.FETCH_PROGRAMS = number
        names = (f"rows, {number} programs", f"sums fetched, {number} programs")
        samples = timing.interleave({names[0]: put, names[1]: get}, repeats, device)
        count = math.ceil(needed / statistics.median(samples[names[0]]))
        samples |= timing.interleave(
            {f"grouped product beside {count} writes": product},
            *(repeats, device),
            before=functools.partial(put_beside, count),
        )
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
