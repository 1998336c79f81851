"""Times of several contenders, taken in turn."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

_DRY_ROUNDS = 3


def interleave(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time the calls alternately (a, b, a, b, ...) and return each one's times in milliseconds.

    A device changes its clock under load and over minutes; what runs in turn meets the same clock.
    """
    for _ in range(2):
        for call in calls.values():
            call()
    if not torch.cuda.is_available():
        return _by_the_host(calls)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [s.elapsed_time(e) for s, e in pairs] for name, pairs in events.items()}


def _by_the_host(calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_DRY_ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def median(times: list[float]) -> float:
    """The median, in the unit of `times`."""
    return statistics.median(times)
