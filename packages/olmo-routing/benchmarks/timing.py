"""Times of several contenders in turn, eager and as CUDA graphs, and their launches."""

import time
from collections.abc import Callable, Mapping

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Calls = Mapping[str, Callable[[], object]]
WARM_UP = 2


def interleave(calls: Calls, rounds: int, cuda: bool) -> dict[str, list[float]]:
    """Time the calls alternately, each on an idle device; milliseconds, by CUDA events.

    On an idle device the time of launching counts, wherever it is longer than that of the work.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(WARM_UP + rounds):
        for name, call in calls.items():
            taken = _by_events(call) if cuda else _by_host(call)
            if repeat >= WARM_UP:
                times[name].append(taken)
    return times


def _by_events(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def _by_host(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def as_graph(call: Callable[[], object], repeats: int) -> Callable[[], None]:
    """Capture `repeats` calls in one CUDA graph, so that replaying is all that the host does."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph.replay


def launches(call: Callable[[], object]) -> int:
    """Kernels, copies and fills that one call puts on the device."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiler.events())
