"""What is measured of all that is not rows: counts, plan, what rows are, and the barriers."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import fields

import timing
import torch
import torch.distributed as dist
from cells import Cell, Shape, make_inputs, make_rowwise
from olmo_ep_comm._rowwise import impl
from olmo_ep_comm._rowwise.plan import SourcePlan, count_requests, keep_requests, plan_source

PLAN = [field.name for field in fields(SourcePlan)]


def thin_rows(shape: Shape, device: torch.device, repeats: int) -> Iterator[Cell]:
    """Time a whole dispatch of rows of 16 bytes, with the moves of the rows."""
    thin = Shape(shape.T, 8, shape.E, shape.K)
    dtype = torch.bfloat16
    inputs, dispatcher = make_inputs(thin, device, dtype), make_rowwise(thin, dtype)
    call = functools.partial(torch.no_grad()(dispatcher.dispatch), *inputs)
    calls: dict[str, Callable[[], object]] = {"eager": call}
    if device.type == "cuda":
        calls["graph"] = timing.as_graph(call)
    yield Cell(f"{shape}: rows of 16 bytes", timing.interleave(calls, repeats, device), {}, 0)


def plan(shape: Shape, device: torch.device, repeats: int) -> Iterator[Cell]:
    """Time counts and plan, as the kernels and as the plain torch they equal; then with barriers.

    On a GPU each is a captured graph, so that the host takes no part.
    """
    dispatcher = make_rowwise(Shape(shape.T, 8, shape.E, shape.K), torch.bfloat16)
    _, ids, weights = make_inputs(shape, device, torch.bfloat16)
    buffers, rank = dispatcher._buffers, dist.get_rank()
    form, counts_RW = buffers.settings.form, buffers.counts.own[0]
    moves = impl.pick_moves("auto", device)

    def in_torch() -> SourcePlan:
        counts_RW[rank, : shape.E] = count_requests(ids, shape.E)
        kept_SQL = keep_requests(counts_RW[:, : shape.E], form, None)
        return plan_source(ids, kept_SQL, rank, form)

    def with_moves(barrier: Callable[[], object] = lambda: None) -> SourcePlan:
        requests = moves.put_requests(buffers.counts, rank, ids, 0, form)
        barrier()
        arguments = (requests, weights, counts_RW, None, form)
        source, ends_L, _ = moves.put_plan(buffers.meta, rank, *arguments)
        barrier()
        moves.take_meta(buffers.meta.own[0], ends_L[-1])
        return source

    with_moves(buffers.memory.barrier)  # now the counts of all ranks are there
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    want, got = in_torch(), with_moves()
    if not all(torch.equal(getattr(want, name), getattr(got, name)) for name in PLAN):
        raise RuntimeError("the plan of the moves differs from that in torch")
    calls: dict[str, Callable[[], object]] = {
        "torch, no barrier": in_torch,
        "moves, no barrier": with_moves,
        "moves": functools.partial(with_moves, buffers.memory.barrier),
    }
    if device.type == "cuda":
        calls = {name: timing.as_graph(call) for name, call in calls.items()}
    yield Cell(f"{shape}: counts and plan", timing.interleave(calls, repeats, device), {}, 0)
