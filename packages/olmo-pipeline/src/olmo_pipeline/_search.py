"""Find a schedule with the least makespan under a cap on live activations.

Every candidate is a greedy walk through time (`_list_scheduler`), which never deadlocks and never
exceeds the cap; what is searched are the due times that steer it. A round of the search tries known
patterns, then random ones and changes of the best (`_patterns`), then small changes of the single
due times of the best (`_refine`), keeping what is not worse. Each walk stops as soon as it cannot
win. With whole backwards every other round runs time backwards, where a backward is a forward: a
greedy walk that drains well is then as easy to find as one that fills well. All ends when the lower
bound of `_bounds` is reached: the schedule is then proved best.

Random numbers come from a fixed seed, so the same arguments always give the same schedule.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence

from ._bounds import least_makespan
from ._costs import Costs
from ._due_times import due_times
from ._list_scheduler import DueTimes, Problem, Rows, Walk, as_schedule
from ._one_f_one_b import interleaved_one_f_one_b
from ._patterns import draw_pattern, known_patterns, vary_pattern
from ._placement import Placement, at_least_one, place_stages
from ._refine import vary_due_times
from ._schedule import Schedule
from ._simulate import lay_out
from ._v_shape import v_shape
from ._validate import live_after, per_rank
from ._zero_bubble import zero_bubble

_ROUNDS = (500, 500, 1000, 2000)  # walks of a round, in turn: some problems like short ones
_EFFORT = 3_000_000  # actions walked over when the number of walks is not given


def search(
    num_ranks: int,
    num_microbatches: int,
    *,
    memory_cap: int | Sequence[int] | None = None,
    costs: Costs | None = None,
    placement: Placement = "v",
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
            rank `min(s, 2 P - 1 - s)`; `"loop"`: stage s on rank `s % P`.
        num_chunks: Stages a rank.
        split_backward: Whether to split every backward into input and weight gradient.
        tries: Greedy walks to try at most; None for as many as take some seconds.

    Returns:
        A schedule that validates with `max_live=memory_cap` under eager sends. If its makespan is
        `lower_bound` of the same arguments, no schedule is better; if not, it is the best found.
        It is never worse than a schedule with a name (`interleaved_one_f_one_b`, `v_shape`,
        `zero_bubble`) that has this placement and fits under the cap.

    Raises:
        ValueError: If a size is below 1, the cap is below `num_chunks`, or costs do not fit.
    """
    problem = _pose(
        num_ranks, num_microbatches, memory_cap, costs, placement, num_chunks, split_backward
    )
    if tries is None:
        num_actions = len(problem.kinds) * num_ranks * num_chunks * num_microbatches
        tries = min(2 * sum(_ROUNDS), max(300, _EFFORT // num_actions))
    at_least_one(tries=tries)
    cap = "no cap" if memory_cap is None else f"at most {memory_cap} live"
    found = as_schedule(problem, _best_rows(problem, tries), f"search, {placement}, {cap}")
    candidates = [found, *_known_schedules(problem, num_chunks)]
    return min(candidates, key=lambda schedule: lay_out(schedule, problem.costs).makespan)


def lower_bound(
    num_ranks: int,
    num_microbatches: int,
    *,
    memory_cap: int | Sequence[int] | None = None,
    costs: Costs | None = None,
    placement: Placement = "v",
    num_chunks: int = 2,
    split_backward: bool = False,
) -> float:
    """Return a makespan that no schedule can beat. Arguments and errors are those of `search`."""
    return least_makespan(
        _pose(num_ranks, num_microbatches, memory_cap, costs, placement, num_chunks, split_backward)
    )


def _pose(
    num_ranks: int,
    num_microbatches: int,
    memory_cap: int | Sequence[int] | None,
    costs: Costs | None,
    placement: Placement,
    num_chunks: int,
    split_backward: bool,
) -> Problem:
    at_least_one(num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    most = num_microbatches * num_chunks
    max_live = per_rank("memory_cap", most if memory_cap is None else memory_cap, num_ranks)
    if min(max_live) < num_chunks:
        raise ValueError(
            f"`memory_cap` must be at least `num_chunks`={num_chunks}, one activation of each "
            f"stage of a rank, got {min(max_live)}."
        )
    return Problem(
        rank_of_stage=place_stages(num_ranks, num_chunks, placement),
        num_microbatches=num_microbatches,
        costs=Costs() if costs is None else costs,
        max_live=max_live,
        splits_backward=split_backward,
    )


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

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.makespan = math.inf
        self.due: DueTimes | None = None
        self.rows: Rows = []

    def offer(self, due: DueTimes) -> bool:
        """Walk; keep it if it is not worse and say so."""
        walk = Walk(self.problem, due)
        makespan = walk.run(limit=self.makespan)
        if makespan == math.inf:
            return False
        self.makespan, self.due, self.rows = makespan, due, walk.rows
        return True


def _best_rows(problem: Problem, tries: int) -> Rows:
    enough = least_makespan(problem) + 1e-6 * problem.unit
    generator = random.Random(0)
    makespan, rows = math.inf, []
    for number, size in enumerate(itertools.cycle(_ROUNDS)):
        turned = number % 2 == 1 and not problem.splits_backward
        best = _Best(_turn(problem) if turned else problem)
        # What is left goes into this round when it is too little for another one.
        size = size if tries - size >= _ROUNDS[0] else tries
        tries -= size
        _run_round(best, size, enough, generator)
        if best.makespan < makespan:
            makespan = best.makespan
            rows = _turn_rows(problem, best.rows) if turned else best.rows
        if makespan <= enough or tries == 0:
            break
    return rows


def _turn(problem: Problem) -> Problem:
    """Return the problem with time running backwards, in which a backward is a forward."""
    by_stage = problem.costs.by_stage(len(problem.rank_of_stage))
    costs = Costs(
        forward=by_stage.actions["backward"],
        backward=by_stage.actions["forward"],
        transfer=by_stage.transfer,
    )
    return dataclasses.replace(problem, costs=costs)


def _turn_rows(problem: Problem, rows: Rows) -> Rows:
    last = problem.num_microbatches - 1
    return [[(1 - kind, stage, last - index) for kind, stage, index in row[::-1]] for row in rows]


def _run_round(best: _Best, tries: int, enough: float, generator: random.Random) -> None:
    """Try patterns for half of the walks, then small changes of the best one."""
    problem = best.problem
    patterns = known_patterns(problem)[:tries] or [draw_pattern(problem, generator)]
    pattern = patterns[0]
    num_patterns = max(len(patterns), tries // 2)
    for number in range(tries):
        if best.makespan <= enough:
            return
        if number < num_patterns:
            if number < len(patterns):
                candidate = patterns[number]
            elif generator.random() < 0.3:
                candidate = draw_pattern(problem, generator)
            else:
                candidate = vary_pattern(problem, pattern, generator)
            if best.offer(due_times(problem, candidate)):
                pattern = candidate
        else:
            assert best.due is not None, "the first walk has no limit"
            best.offer(vary_due_times(problem, best.due, generator))
