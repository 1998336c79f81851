"""Patterns of due times to try: some that are known to be good, and others at random."""

import dataclasses
import math
import random

from ._due_times import Pattern
from ._list_scheduler import Problem

_STEPS = (0.5, 1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
_LATE = 1e6  # a weight gradient that is due after all else


def known_patterns(problem: Problem) -> list[Pattern]:
    """Return patterns that are best, or nearly, at equal costs for one cap or another.

    They were found by `search` for 4 to 16 ranks. There are some for two chunks on the V only.
    """
    ranks = problem.num_ranks
    if problem.rank_of_stage != (*range(ranks), *range(ranks)[::-1]):
        return []
    if problem.splits_backward:
        rows = [
            ((1.0, 3.0, 1.0, 1.0), (1.0, 1.0, 2.0), math.inf, _LATE, 1, 0.0),
            ((4.0, 4.0, 1.5, 0.5), (4.0, 2.5, 2.0), math.inf, _LATE, 1, 0.0),
            ((1.0, 1.0, 2.5, 4.0), (1.5, 1.5, 1.5), 2.0 * ranks, 16.0 * ranks, ranks, 2.0),
            ((1.0, 1.0, 2.5, 1.5), (0.5, 2.5, 1.5), 1.0 * ranks, 16.0 * ranks, ranks, 1.0),
            ((1.0, 1.0, 2.5, 1.0), (1.5, 1.5, 1.5), 2.0 * ranks, 4.0, 1, 0.0),
            ((1.0, 1.0, 2.5, 1.0), (1.0, 1.5, 1.5), 1.5 * ranks, 16.0 * ranks, 4, 2.0),
        ]
    else:
        rows = [
            ((1.0, 1.0, 3.0, 2.0), (1.0, 1.0, 1.0), 2.0, 0.0, 1, 0.0),
            ((1.0, 1.0, 2.5, 1.5), (2.0, 2.0, 1.5), 3.0, 0.0, 1, 0.0),
            ((1.0, 1.0, 2.5, 1.5), (2.5, 4.0, 1.5), 1.0 * ranks, 0.0, 1, 0.0),
            ((1.0, 1.5, 2.5, 1.0), (1.5, 3.0, 1.5), 2.0 * ranks, 0.0, ranks, 3.0),
            ((1.0, 1.0, 3.0, 1.0), (3.0, 2.0, 1.0), math.inf, 0.0, 1, 0.0),
            ((1.0, 1.0, 2.0, 3.0), (1.0, 4.0, 4.0), math.inf, 0.0, ranks, 3.0),
        ]
    return [
        Pattern(
            steps=steps,
            turns=turns,
            slack=slack,
            weight_delay=delay,
            group=group,
            spacing=spacing,
        )
        for steps, turns, slack, delay, group, spacing in rows
    ]


def draw_pattern(problem: Problem, generator: random.Random) -> Pattern:
    """Return a pattern at random."""
    ranks = problem.num_ranks
    stretches = 2 * -(-len(problem.rank_of_stage) // ranks)
    slacks = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, ranks, 1.5 * ranks, 2.0 * ranks, math.inf)
    pick = generator.choice
    return Pattern(
        steps=tuple(pick(_STEPS) for _ in range(stretches)),
        turns=tuple(pick(_STEPS) for _ in range(stretches - 1)),
        slack=pick(slacks),
        weight_delay=pick((0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 4.0 * ranks, 16.0 * ranks)),
        patience=pick((0.0, 0.0, 0.0, 0.5, 1.0)),
        group=pick((1, 1, 1, 2, 3, 4, ranks)),
        spacing=pick((0.0, 1.0, 2.0, 3.0)),
    )


def vary_pattern(problem: Problem, pattern: Pattern, generator: random.Random) -> Pattern:
    """Return a pattern with one to three numbers of another one at random."""
    other = draw_pattern(problem, generator)
    names = ("steps", "steps", "turns", "slack", "weight_delay", "patience", "group", "spacing")
    for _ in range(generator.choice((1, 1, 2, 3))):
        name = generator.choice(names)
        value = getattr(other, name)
        if name in ("steps", "turns"):
            kept = getattr(pattern, name)
            place = generator.randrange(len(kept))
            value = (*kept[:place], value[place], *kept[place + 1 :])
        pattern = dataclasses.replace(pattern, **{name: value})
    return pattern
