"""Small changes of single due times, where a pattern alone is not the best."""

import math
import random
from collections.abc import Iterable

from ._list_scheduler import DueTimes, Problem

_CHANGES = (-4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0)


def vary_due_times(problem: Problem, due: DueTimes, generator: random.Random) -> DueTimes:
    """Return due times with one to three changes at random.

    A change moves a part of the chain of one, of all, or of every second, third or fourth
    microbatch: one action, the rest from some action on, or all. Or it draws another slack and
    patience.
    """
    times = [[list(row) for row in rows] for rows in due.times]
    slack, patience, unit = due.slack, due.patience, problem.unit
    for _ in range(generator.choice((1, 1, 2, 3))):
        if generator.random() < 0.2:
            slack = unit * generator.choice((0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 8.0, math.inf))
            patience = unit * generator.choice((0.0, 0.0, 0.5, 1.0))
            continue
        change = unit * generator.choice(_CHANGES)
        chosen = _draw_microbatches(problem.num_microbatches, generator)
        for kind, stage in _draw_actions(problem, generator):
            row = times[kind][stage]
            for index in chosen:
                row[index] += change
    return DueTimes(times, slack, patience)


def _draw_microbatches(count: int, generator: random.Random) -> range:
    which = generator.random()
    if which < 0.3:
        index = generator.randrange(count)
        return range(index, index + 1)
    if which < 0.7:
        return range(count)
    stride = generator.choice((2, 3, 4))
    return range(generator.randrange(stride), count, stride)


def _draw_actions(problem: Problem, generator: random.Random) -> Iterable[tuple[int, int]]:
    """Return (kind, stage) of one action, of the chain from some action on, or of all."""
    num_stages, kinds = len(problem.rank_of_stage), range(len(problem.kinds))
    which = generator.random()
    if which < 0.4:
        return [(generator.choice(kinds), generator.randrange(num_stages))]
    first = 0 if which < 0.6 else generator.randrange(1, 2 * num_stages)
    forward = [(0, stage) for stage in range(first, num_stages)]
    last = min(num_stages, 2 * num_stages - first)
    return forward + [(kind, stage) for kind in kinds[1:] for stage in range(last)]
