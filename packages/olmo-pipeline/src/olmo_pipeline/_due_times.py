"""Due times from the way of one microbatch through the pipeline.

A microbatch walks the chain F0, F1, .., F(S-1), B(S-1), .., B1, B0. The chain falls into one
stretch per chunk on the way there and one on the way back. Within a stretch each action is due one
*step* after the one before it, counted in the time that one takes with its message; so is the first
of the next stretch, by a *turn*. Weight gradients are due some time after their input gradients,
and a microbatch one period, the work of the busiest rank, after the one before it, or in groups. A
handful of numbers thus gives every due time. P. Qi et al., "Pipeline Parallelism with Controllable
Memory", 2024, calls such a pattern a building block and reads the memory off it: lifetime over
period.
"""

import math
from dataclasses import dataclass

from ._list_scheduler import DueTimes, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """The numbers. Times that are not steps are in units of the mean duration of an action.

    Args:
        steps: Step within each of the `2 v` stretches of a pipeline with v chunks a rank.
        turns: The `2 v - 1` steps from one stretch to the next.
        slack: How long before it is due a forward may start.
        weight_delay: Time from an input gradient to its weight gradient.
        patience: How long a rank may wait for an action due before the ones at hand.
        group: Microbatches that are due together, `spacing` apart.
        spacing: Time between two microbatches of a group.
    """

    steps: tuple[float, ...]
    turns: tuple[float, ...]
    slack: float = math.inf
    weight_delay: float = 0.0
    patience: float = 0.0
    group: int = 1
    spacing: float = 0.0


def due_times(problem: Problem, pattern: Pattern) -> DueTimes:
    """Return when every action of `problem` is due."""
    num_stages, unit = len(problem.rank_of_stage), problem.unit
    length = 2 * num_stages // len(pattern.steps)
    forward = list(range(num_stages))
    chain = [(0, stage) for stage in forward] + [(1, stage) for stage in forward[::-1]]
    times = [0.0]
    for position in range(1, 2 * num_stages):
        kind, stage = chain[position - 1]
        stretch, within = divmod(position, length)
        step = pattern.steps[stretch] if within else pattern.turns[stretch - 1]
        times.append(
            times[-1] + step * (problem.durations[kind][stage] + _delay(problem, position))
        )
    backward = tuple(times[: num_stages - 1 : -1])
    offsets = (tuple(times[:num_stages]), backward)
    if problem.splits_backward:
        offsets += (tuple(time + unit * pattern.weight_delay for time in backward),)
    period = max(map(problem.work_of, range(problem.num_ranks))) / problem.num_microbatches
    shifts = []
    for index in range(problem.num_microbatches):
        number, within = divmod(index, pattern.group)
        shifts.append(period * pattern.group * number + unit * pattern.spacing * within)
    due = tuple(
        tuple(tuple(offset + shift for shift in shifts) for offset in row) for row in offsets
    )
    return DueTimes(due, unit * pattern.slack, unit * pattern.patience)


def _delay(problem: Problem, position: int) -> float:
    """Return the message time before the action at `position` of the chain."""
    num_stages = len(problem.rank_of_stage)
    if position == num_stages:
        return 0.0
    return problem.delays[position - 1 if position < num_stages else 2 * num_stages - 1 - position]
