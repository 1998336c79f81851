"""Find a schedule with the least makespan under a cap on live activations.

The search starts from constructions (`_starts`): known patterns and periodic orders, under the cap
and under smaller ones. Every further candidate is a greedy walk through time (`_list_scheduler`),
which never deadlocks and never exceeds the cap; what is searched are the due times that steer it.
The first round makes small changes of the single due times of the best start (`_refine`). Later
rounds try known patterns, then random ones and changes of the best (`_patterns`), then small
changes again, keeping what is not worse. Each walk stops as soon as it cannot win. With whole
backwards every other round runs time backwards, where a backward is a forward: a greedy walk that
drains well is then as easy to find as one that fills well. All ends when the lower bound of
`_bounds` is reached: the schedule is then proved best.

Random numbers come from a fixed seed and effort is counted in walks and actions, not in seconds, so
the same arguments always give the same schedule.
"""

import itertools
import math
import random
from collections.abc import Sequence
from functools import partial
from typing import Literal

from ._bounds import least_makespan
from ._costs import Costs
from ._due_times import due_times
from ._list_scheduler import DueTimes, Problem, Rows, as_schedule
from ._one_f_one_b import interleaved_one_f_one_b
from ._patterns import draw_pattern, known_patterns, vary_pattern
from ._placement import Placement, at_least_one, place_stages
from ._refine import vary_due_times
from ._schedule import Schedule
from ._simulate import lay_out
from ._starts import Budget, best_start, turn, turn_rows
from ._v_shape import v_shape
from ._validate import live_after, per_rank
from ._zero_bubble import zero_bubble

_ROUNDS = (500, 500, 1000, 2000)  # walks of a round, in turn: some problems like short ones
_WIDEST = 1e6  # of the least cost: a sum of many costs must still notice the least
_EFFORT = 1_000_000  # actions walked over, when the number of walks is not given


def search(
    num_ranks: int,
    num_microbatches: int,
    *,
    memory_cap: int | Sequence[int] | None = None,
    costs: Costs | None = None,
    placement: Placement | Literal["any"] = "v",
    num_chunks: int = 2,
    split_backward: bool = False,
    tries: int | None = None,
) -> Schedule:
    """Return the schedule with the least makespan that was found, microbatches in order.

    Args:
        num_ranks: Ranks P, at least 1.
        num_microbatches: Microbatches m, at least 1.
        memory_cap: The most activations that a rank may keep at once, one number or one per rank,
            at least `num_chunks` (counted as `Timeline.peak_live_per_rank` counts); None for any
            number.
        costs: Costs of the `num_ranks * num_chunks` stages; `Costs()` when None.
        placement: `"v"`: every other chunk runs back through the ranks, stage s of two chunks on
            rank `min(s, 2 P - 1 - s)`; `"loop"`: stage s on rank `s % P`; `"any"`: the better of
            the two, the V of equal ones, in up to twice the time.
        num_chunks: Stages a rank.
        split_backward: Whether to split every backward into input and weight gradient.
        tries: Greedy walks to try at most; None for 8000, or as many as place a million actions:
            some seconds.

    Returns:
        A schedule that validates with `max_live=memory_cap` under eager sends. If its makespan is
        `lower_bound` of the same arguments, no schedule is better; if not, it is the best found.
        It is never worse than a schedule with a name (`interleaved_one_f_one_b`, `v_shape`,
        `zero_bubble`) that has this placement and fits under the cap. A larger `memory_cap` (one
        number) is never worse than the periodic orders and patterns under smaller ones; what the
        walks at random add to that may differ.

    Raises:
        ValueError: If a size is below 1, the cap is below `num_chunks`, or costs do not fit: the
            greatest must be at most 10^6 times the least, as times are sums of them in floats.
        TypeError: If a size or the cap is no whole number, or the costs are no `Costs`.
    """
    problems = _pose(
        num_ranks, num_microbatches, memory_cap, costs, placement, num_chunks, split_backward
    )
    found: list[Schedule] = []
    for problem in problems:
        if tries is None:
            budget = Budget(2 * sum(_ROUNDS), _EFFORT)
        else:
            at_least_one(tries=tries)
            budget = Budget(tries, math.inf)
        least = least_makespan(problem) + 1e-6 * problem.unit
        if found and _makespan(problem, found[-1]) <= least:
            break  # the other placement cannot be better
        cap = "no cap" if memory_cap is None else f"at most {memory_cap} live"
        name = "loop" if found or placement == "loop" else "v"
        schedule = as_schedule(problem, _best_rows(problem, budget), f"search, {name}, {cap}")
        candidates = [schedule, *_known_schedules(problem, num_chunks)]
        found.append(min(candidates, key=partial(_makespan, problem)))
    return min(found, key=partial(_makespan, problems[0]))


def lower_bound(
    num_ranks: int,
    num_microbatches: int,
    *,
    memory_cap: int | Sequence[int] | None = None,
    costs: Costs | None = None,
    placement: Placement | Literal["any"] = "v",
    num_chunks: int = 2,
    split_backward: bool = False,
) -> float:
    """Return a makespan that no schedule can beat. Arguments and errors are those of `search`."""
    problems = _pose(
        num_ranks, num_microbatches, memory_cap, costs, placement, num_chunks, split_backward
    )
    return min(map(least_makespan, problems))


def _pose(
    num_ranks: int,
    num_microbatches: int,
    memory_cap: int | Sequence[int] | None,
    costs: Costs | None,
    placement: Placement | Literal["any"],
    num_chunks: int,
    split_backward: bool,
) -> list[Problem]:
    """Return the problem of each placement that is asked for, the V first."""
    at_least_one(num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    most = num_microbatches * num_chunks
    max_live = per_rank("memory_cap", most if memory_cap is None else memory_cap, num_ranks)
    if min(max_live) < num_chunks:
        raise ValueError(
            f"`memory_cap` must be at least `num_chunks`={num_chunks}, one activation of each "
            f"stage of a rank, got {min(max_live)}."
        )
    if not isinstance(costs, Costs | None):
        raise TypeError(f"`costs` must be `Costs` or None, got {costs!r}.")
    if placement not in ("v", "loop", "any"):
        raise ValueError(f'`placement` must be "v", "loop" or "any", got {placement!r}.')
    placements: tuple[Placement, ...] = ("v", "loop") if placement == "any" else (placement,)
    problems = [
        Problem(
            rank_of_stage=place_stages(num_ranks, num_chunks, each),
            num_microbatches=num_microbatches,
            costs=Costs() if costs is None else costs,
            max_live=max_live,
            splits_backward=split_backward,
        )
        for each in placements
    ]
    durations = [cost for costs_of_kind in problems[0].durations for cost in costs_of_kind]
    shortest, longest = min(durations), max([*durations, *problems[0].delays])
    if longest > _WIDEST * shortest:
        raise ValueError(
            f"the greatest of `costs` must be at most {_WIDEST:.0e} times the least cost of an "
            f"action, got {longest} and {shortest}; times are sums of both."
        )
    return problems


def _makespan(problem: Problem, schedule: Schedule) -> float:
    return lay_out(schedule, problem.costs).makespan


def _known_schedules(problem: Problem, num_chunks: int) -> list[Schedule]:
    """Return the schedules with a name that solve the problem, whatever their makespan."""
    sizes = problem.num_ranks, problem.num_microbatches
    if problem.splits_backward:
        known = [zero_bubble(*sizes, "h1"), zero_bubble(*sizes, "v")]
    else:
        known = [interleaved_one_f_one_b(*sizes, num_chunks), v_shape(*sizes)]
    fitting = []
    for schedule in known:
        if schedule.rank_of_stage == problem.rank_of_stage:
            peaks = (max(live_after(row)) for row in schedule.actions)
            if all(peak <= cap for peak, cap in zip(peaks, problem.max_live, strict=True)):
                fitting.append(schedule)
    return fitting


class _Best:
    """The best walk so far; a candidate that is as good replaces it, so that the search drifts."""

    def __init__(self, problem: Problem, budget: Budget) -> None:
        self.problem, self.budget = problem, budget
        self.makespan = math.inf
        self.due: DueTimes | None = None
        self.rows: Rows = []

    def offer(self, due: DueTimes) -> bool:
        """Walk; keep it if it is not worse and say so."""
        makespan, rows = self.budget.walk(self.problem, due, self.makespan)
        if makespan == math.inf:
            return False
        self.makespan, self.due, self.rows = makespan, due, rows
        return True


def _best_rows(problem: Problem, budget: Budget) -> Rows:
    enough = least_makespan(problem) + 1e-6 * problem.unit
    generator = random.Random(0)
    start = best_start(problem, budget)
    makespan, rows = math.inf, []
    if start is not None:
        makespan = start.makespan
        rows = turn_rows(problem, start.rows) if start.turned else start.rows
    first = int(start is not None and start.turned)
    for number, size in enumerate(itertools.cycle(_ROUNDS), first):
        if makespan <= enough or budget.is_spent:
            return rows
        turned = number % 2 == 1 and not problem.splits_backward
        if number == first and start is not None:
            best = _Best(start.problem, budget)
            best.makespan, best.due, best.rows = start.makespan, start.due, start.rows
            _refine(best, size, enough, generator)
        else:
            best = _Best(turn(problem) if turned else problem, budget)
            _explore(best, size // 2, enough, generator)
            _refine(best, size // 2, enough, generator)
        if best.makespan < makespan:
            makespan = best.makespan
            rows = turn_rows(problem, best.rows) if turned else best.rows
    return rows


def _explore(best: _Best, walks: int, enough: float, generator: random.Random) -> None:
    """Try known patterns, then random ones and changes of the best one."""
    problem = best.problem
    patterns = known_patterns(problem) or [draw_pattern(problem, generator)]
    pattern = patterns[0]
    for number in range(max(len(patterns), walks)):
        if best.makespan <= enough or (best.due is not None and best.budget.is_spent):
            return
        if number < len(patterns):
            candidate = patterns[number]
        elif generator.random() < 0.3:
            candidate = draw_pattern(problem, generator)
        else:
            candidate = vary_pattern(problem, pattern, generator)
        if best.offer(due_times(problem, candidate)):
            pattern = candidate


def _refine(best: _Best, walks: int, enough: float, generator: random.Random) -> None:
    """Try small changes of the best one."""
    assert best.due is not None, "the first walk has no limit"
    for _ in range(walks):
        if best.makespan <= enough or best.budget.is_spent:
            return
        best.offer(vary_due_times(best.problem, best.due, generator))
