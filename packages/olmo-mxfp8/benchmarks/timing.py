"""Times of several contenders taken in turn, and the error between two results."""

import random
import time
from collections.abc import Callable

import torch
from cells import Settings
from torch import Tensor

_MOST_ROUNDS = 100
_DRY_ROUNDS = 2
_HEAD_START_CYCLES = 20_000_000  # about 10 ms, behind which launches hide


def in_turn(calls: dict[str, Callable[[], object]], settings: Settings) -> dict[str, list[float]]:
    """Time the calls in rounds, each in an order of its own, and return each one's milliseconds.

    A device changes its clock over a run, and what runs in turn meets the same clock. It also sets
    the clock by the power of the last milliseconds: behind a call that moves bytes a product is
    faster than behind a product, so none may always have the same neighbours.
    """
    if settings.is_dry:
        return {
            name: [_by_the_host(call) for _ in range(_DRY_ROUNDS)] for name, call in calls.items()
        }
    for call in calls.values():
        call()
    first = _by_events(calls, 1)
    one_round = sum(times[0] for times in first.values()) / 1e3
    rounds = max(int(settings.budget_s / one_round), settings.least_rounds)
    return _by_events(calls, min(rounds, _MOST_ROUNDS))


def _by_events(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    order, shuffle = list(calls.items()), random.Random(0)
    torch.cuda.synchronize()
    torch.cuda._sleep(_HEAD_START_CYCLES)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name, call in order:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            call()
            pair[1].record()
            marks[name].append(pair)
    torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) for a, b in pairs] for name, pairs in marks.items()}


def _by_the_host(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def relative_error(got: Tensor, want: Tensor) -> float:
    """`|got - want| / |want|`; NaN wherever one is in either."""
    difference = scale = 0.0
    # In pieces: a float64 copy of everything would not fit beside the operands.
    pieces = [t.detach().reshape(-1).split(1 << 26) for t in (got, want)]
    for pair in zip(*pieces, strict=True):
        a, b = (piece.float() for piece in pair)
        difference += float((a - b).square().sum(dtype=torch.float64))
        scale += float(b.square().sum(dtype=torch.float64))
    return (difference / scale) ** 0.5
