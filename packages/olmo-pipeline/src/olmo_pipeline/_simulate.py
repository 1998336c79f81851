"""How long a schedule takes and what it keeps, from the lists alone.

A rank performs its actions in order. An action starts when the rank is free and what it needs has
come:

    start(a) = max( end(previous action of the rank),
                    max over needs n of  end(n) + (transfer if n is on another rank else 0) )

The makespan is the last end; the bubble is the idle share of all rank-time,
`1 - sum(durations) / (num_ranks * makespan)`. Memory does not depend on time: on each rank it is
the greatest number of forwards whose backward has not been performed, counted along its list.

This is a lower bound for a machine: it knows no launch time, no contention and no late kernels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ._schedule import Action, Schedule, needs_of
from ._validate import replay, validate


class Span(NamedTuple):
    """One action in time."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What `simulate` found.

    Args:
        makespan: Time from the first start to the last end, in the unit of the given costs.
        bubble: Idle share of all rank-time, in [0, 1).
        peak_live_per_rank: For each rank, the most forwards of its chunks not yet consumed by their
            backward.
        spans: Every action with its start and end, by rank and then by start.
    """

    makespan: float
    bubble: float
    peak_live_per_rank: tuple[int, ...]
    spans: tuple[Span, ...]


def simulate(
    schedule: Schedule,
    *,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    transfer: float = 0.0,
) -> Timeline:
    """Lay a schedule out in time.

    Args:
        schedule: A valid schedule.
        forward: Cost of one forward: one number, or one per stage. Positive.
        backward: Cost of one backward, likewise.
        transfer: Time that a message between different ranks takes, not below 0. It delays only the
            action that takes the message in.

    Raises:
        ValueError: If the schedule is not valid, a cost is not positive and finite, or a sequence
            of costs has another length than `num_stages`.
    """
    validate(schedule)
    costs = {
        "forward": _stage_costs("forward", forward, schedule.num_stages),
        "backward": _stage_costs("backward", backward, schedule.num_stages),
    }
    if not (transfer >= 0 and math.isfinite(transfer)):
        raise ValueError(f"`transfer` must be finite and not below 0, got {transfer}.")
    ends: dict[Action, float] = {}
    free = [0.0] * schedule.num_ranks
    busy = 0.0
    spans: list[Span] = []
    for rank, action in replay(schedule):
        start = free[rank]
        for need in needs_of(action, schedule.num_stages):
            same_rank = schedule.rank_of_stage[need.stage] == rank
            start = max(start, ends[need] + (0.0 if same_rank else transfer))
        duration = costs[action.kind][action.stage]
        ends[action] = free[rank] = start + duration
        busy += duration
        spans.append(Span(rank, action, start, free[rank]))
    makespan = max(free)
    return Timeline(
        makespan=makespan,
        bubble=max(0.0, 1.0 - busy / (schedule.num_ranks * makespan)),
        peak_live_per_rank=tuple(map(_peak_live, schedule.actions)),
        spans=tuple(sorted(spans, key=lambda span: (span.rank, span.start))),
    )


def _peak_live(actions: Sequence[Action]) -> int:
    live = peak = 0
    for action in actions:
        live += 1 if action.kind == "forward" else -1
        peak = max(peak, live)
    return peak


def _stage_costs(name: str, given: float | Sequence[float], num_stages: int) -> tuple[float, ...]:
    costs = tuple(given) if isinstance(given, Sequence) else (given,) * num_stages
    if len(costs) != num_stages:
        raise ValueError(
            f"`{name}` must be one number or one per stage ({num_stages}), got {len(costs)}."
        )
    for cost in costs:
        if not (cost > 0 and math.isfinite(cost)):
            raise ValueError(f"`{name}` must be positive and finite, got {cost}.")
    return costs
