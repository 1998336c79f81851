"""Times of several contenders, taken in turn, and the error between their results."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from cells import Settings
from torch import Tensor

ERROR_LIMIT = 2e-2
_MOST_ROUNDS = 100
_HEAD_START_CYCLES = 20_000_000  # about 10 ms
_DRY_ROUNDS = 3
_CHUNK = 1 << 26

Calls = Mapping[str, Callable[[], object]]


def interleave(calls: Calls, settings: Settings) -> dict[str, list[float]]:
    """Time the calls alternately (a, b, a, b, ...) and return each one's times in milliseconds.

    A device changes its clock under load and over minutes; what runs in turn meets the same clock.
    Everything is enqueued without waiting, behind a pause of the device and one round that is not
    timed, so that the launches of a call hide behind the work before it, as they do in training.
    """
    for _ in range(2):
        for call in calls.values():
            call()
    if settings.device != "cuda":
        return _by_the_host(calls)

    one_round = sum(times[0] for times in _by_events(calls, 1).values()) / 1e3
    rounds = int(settings.budget_s / max(one_round, 1e-6))
    return _by_events(calls, min(max(rounds, settings.least_rounds), _MOST_ROUNDS))


def _by_events(calls: Calls, rounds: int) -> dict[str, list[float]]:
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
        name: [] for name in calls
    }
    torch.cuda.synchronize()
    torch.cuda._sleep(_HEAD_START_CYCLES)
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [s.elapsed_time(e) for s, e in pairs] for name, pairs in events.items()}


def _by_the_host(calls: Calls) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_DRY_ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def host_times(calls: Calls, settings: Settings) -> dict[str, float]:
    """Milliseconds, in the median, until each call returns to the host on an idle device."""
    times = {}
    for name, call in calls.items():
        taken = []
        for _ in range(3):
            synchronize(settings)
            start = time.perf_counter()
            call()
            taken.append((time.perf_counter() - start) * 1e3)
        times[name] = statistics.median(taken)
    synchronize(settings)
    return times


def first_time(call: Callable[[], object], settings: Settings) -> float:
    """Seconds until the device has done `call`, everything that it compiles or tunes included."""
    synchronize(settings)
    start = time.perf_counter()
    call()
    synchronize(settings)
    return time.perf_counter() - start


def synchronize(settings: Settings) -> None:
    """Wait for the device, if there is one."""
    if settings.device == "cuda":
        torch.cuda.synchronize()


def poison(num_bytes: int, settings: Settings) -> None:
    """Leave NaN in memory that the next results are likely to get, so that gaps in them show."""
    torch.full((num_bytes // 2,), float("nan"), dtype=torch.bfloat16, device=settings.device)


def relative_error(got: Tensor, want: Tensor) -> float:
    """`|got - want| / |want|` in the Euclidean norm; NaN or infinity wherever one is in either."""
    if got.shape != want.shape:
        raise ValueError(f"Results must have one shape, got {got.shape} and {want.shape}.")
    difference, scale = 0.0, 0.0
    # In pieces: a float32 copy of a whole stack of weights would take gigabytes.
    for a, b in zip(got.reshape(-1).split(_CHUNK), want.reshape(-1).split(_CHUNK), strict=True):
        difference += float((a.float() - b.float()).square().sum(dtype=torch.float64))
        scale += float(b.float().square().sum(dtype=torch.float64))
    if difference == 0.0:
        return 0.0
    return (difference / scale) ** 0.5 if scale else float("inf")
