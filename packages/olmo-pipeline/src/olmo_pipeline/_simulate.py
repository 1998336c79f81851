"""How long a schedule takes and what it keeps, from the lists alone.

A rank performs its actions in order. An action starts when the rank is free and what it needs has
come:

    start(a) = max( end(previous action of the rank),
                    max over needs n of  end(n) + (transfer if n is on another rank else 0) )

The makespan is the last end; the bubble is the idle share of all rank-time,
`1 - sum(durations) / (num_ranks * makespan)`. That counts the stagger of the ranks' starts and
ends too, which papers on zero bubbles leave out. The peak of memory does not depend on time: on
each rank it is the greatest number of forwards whose backward (or weight gradient, where the
backward is split) has not been performed, counted along its list.

This is a lower bound for a machine: it knows no launch time, no contention and no late kernels.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from ._costs import Cost, Costs
from ._schedule import Action, Schedule, needs_of, results_of
from ._validate import live_after, replay, validate


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
            backward (its weight gradient, where the backward is split).
        spans: Every action with its start and end, by rank and then by start.
        schedule: What was laid out.
    """

    makespan: float
    bubble: float
    peak_live_per_rank: tuple[int, ...]
    spans: tuple[Span, ...] = field(repr=False)
    schedule: Schedule = field(repr=False)

    def spans_of(self, rank: int) -> tuple[Span, ...]:
        """Return what `rank` performs, in order.

        Raises:
            ValueError: If `rank` is not in [0, num_ranks).
        """
        self.schedule.stages_of(rank)  # raises
        return tuple(span for span in self.spans if span.rank == rank)

    def live_over_time(self, rank: int) -> tuple[tuple[float, int], ...]:
        """Return (time, activations live from then on), a step each time the number changes.

        An activation counts from the start of its forward to the end of its backward.

        Raises:
            ValueError: If `rank` is not in [0, num_ranks).
        """
        changes: dict[float, int] = {0.0: 0}
        for span in self.spans_of(rank):
            if span.action.kind == "forward":
                changes[span.start] = changes.get(span.start, 0) + 1
            elif span.action.kind != "input_gradient":
                changes[span.end] = changes.get(span.end, 0) - 1
        steps, live = [], 0
        for time in sorted(changes):
            live += changes[time]
            if not steps or steps[-1][1] != live:
                steps.append((time, live))
        return tuple(steps)


def simulate(
    schedule: Schedule,
    *,
    forward: Cost = 1.0,
    backward: Cost = 2.0,
    input_gradient: Cost | None = None,
    weight_gradient: Cost | None = None,
    transfer: Cost = 0.0,
) -> Timeline:
    """Lay a schedule out in time.

    Args:
        schedule: A valid schedule.
        forward: Cost of one forward: one number, or one per stage. Positive.
        backward: Cost of one whole backward, likewise.
        input_gradient: Cost of one input gradient, likewise; None for half of `backward`.
        weight_gradient: Cost of one weight gradient, likewise; None for the rest of `backward`.
        transfer: Time that a message between neighbouring stages on different ranks takes: one
            number or one per pair of stages, not below 0. It delays only the action that takes the
            message in.

    Raises:
        ValueError: If the schedule is not valid, a cost is not positive and finite, or a sequence
            of costs has another length than `num_stages` (one less for `transfer`).
    """
    costs = Costs(
        forward=forward,
        backward=backward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        transfer=transfer,
    )
    return lay_out(schedule, costs)


def lay_out(schedule: Schedule, costs: Costs) -> Timeline:
    """Do what `simulate` does, with costs in one object."""
    validate(schedule)
    by_stage = costs.by_stage(schedule.num_stages)
    ends: dict[Action, float] = {}
    free = [0.0] * schedule.num_ranks
    busy = 0.0
    spans: list[Span] = []
    for rank, action in replay(schedule):
        start = free[rank]
        for need in needs_of(action, schedule.num_stages):
            delay = 0.0
            if schedule.rank_of_stage[need.stage] != rank:
                delay = by_stage.transfer_between(need.stage, action.stage)
            start = max(start, ends[need] + delay)
        duration = by_stage.actions[action.kind][action.stage]
        free[rank] = start + duration
        for result in results_of(action):
            ends[result] = free[rank]
        busy += duration
        spans.append(Span(rank, action, start, free[rank]))
    makespan = max(free)
    return Timeline(
        makespan=makespan,
        bubble=max(0.0, 1.0 - busy / (schedule.num_ranks * makespan)),
        peak_live_per_rank=tuple(max(live_after(row), default=0) for row in schedule.actions),
        spans=tuple(sorted(spans, key=lambda span: (span.rank, span.start))),
        schedule=schedule,
    )
