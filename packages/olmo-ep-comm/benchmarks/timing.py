"""Times of calls that all ranks make together: the slowest rank of each repeat counts."""

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

WARM_UP = 3
Calls = Mapping[str, Callable[[], object]]


def interleave(
    calls: Calls, repeats: int, device: torch.device, before: Callable[[], object] | None = None
) -> dict[str, list[float]]:
    """Time the calls alternately, all ranks starting together; milliseconds of the slowest rank.

    `before` is run before each call, and enqueues work on another stream that is not waited for.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(WARM_UP + repeats):
        for name, call in calls.items():
            dist.barrier()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if before is not None:
                before()
            taken = _by_events(call) if device.type == "cuda" else _by_host(call)
            if repeat >= WARM_UP:
                times[name].append(taken)
    return {name: _slowest(values, device) for name, values in times.items()}


def as_graph(call: Callable[[], object]) -> Callable[[], None]:
    """Capture one call in a CUDA graph, so that replaying is all that the host does."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _slowest(values: list[float], device: torch.device) -> list[float]:
    every = torch.tensor(values, device=device)
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return every.tolist()


def _by_events(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def _by_host(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
