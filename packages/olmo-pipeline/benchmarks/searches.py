"""What `search` finds under a cap on activations, beside what is proved: `search.md`."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Literal, NamedTuple

from olmo_pipeline import Costs, lower_bound, search, simulate

WHOLE, SPLIT = "whole", "split"
HEAVY = 1.5  # the last stage, which has the head, over another
UNITS = "1 each"
DOUBLE = "whole backward 2"
HEAVY_LAST = "backward 2, last stage half as long again"
TRANSFER = "backward 2, messages 1/4"

# A solver (CP-SAT, microbatches in order) proved these least; the bound does not reach them.
SOLVED = {
    (4, 8, "v", WHOLE, 4): 50,
    (4, 8, "v", WHOLE, 5): 46,
    (4, 8, "loop", WHOLE, 5): 48,
    (4, 8, "v", SPLIT, 5): 56,
}


class Problem(NamedTuple):
    """A search, two chunks a rank."""

    num_ranks: int
    num_microbatches: int
    placement: Literal["v", "loop"]
    backward: str
    costs: str
    cap: int


class Found(NamedTuple):
    """What came of it."""

    problem: Problem
    makespan: float
    bubble: float
    bound: float

    @property
    def state(self) -> str:
        """How good the makespan is known to be."""
        problem = self.problem
        if self.makespan <= self.bound + 1e-6:
            return "proved"
        key = (*problem[:4], problem.cap)
        solved = SOLVED.get(key) if problem.costs == UNITS else None
        if solved is None:
            return "best found"
        return "proved by a solver" if self.makespan <= solved else f"a solver finds {solved}"


def _problems() -> Iterator[Problem]:
    for backward in (WHOLE, SPLIT):
        yield from (Problem(4, 8, "v", backward, UNITS, cap) for cap in (4, 5, 6, 7, 8))
    yield from (Problem(4, 8, "loop", WHOLE, UNITS, cap) for cap in (5, 7, 8, 11))
    for backward in (WHOLE, SPLIT):
        yield from (Problem(8, 32, "v", backward, UNITS, cap) for cap in (9, 10, 12, 14, 16))
        yield from (Problem(16, 64, "v", backward, UNITS, cap) for cap in (18, 24, 32))
        # The halves of a split backward cost 1 in any case.
        for costs in (*((DOUBLE,) if backward == WHOLE else ()), HEAVY_LAST, TRANSFER):
            yield from (Problem(8, 32, "v", backward, costs, cap) for cap in (10, 12, 16))
    yield from (Problem(8, 64, "v", WHOLE, DOUBLE, cap) for cap in (12,))
    yield from (Problem(16, 64, "v", WHOLE, DOUBLE, cap) for cap in (22, 24, 32))


PROBLEMS = tuple(_problems())


def costs_of(problem: Problem) -> Costs:
    """Return the costs that a problem names."""
    if problem.costs == UNITS and problem.backward == WHOLE:
        return Costs(backward=1.0)
    if problem.costs in (UNITS, DOUBLE):
        return Costs()
    if problem.costs == TRANSFER:
        return Costs(transfer=0.25)
    stages = [1.0] * (2 * problem.num_ranks - 1) + [HEAVY]
    return Costs(
        forward=stages,
        backward=[2 * cost for cost in stages],
        input_gradient=stages,
        weight_gradient=stages,
    )


def measure(problems: Iterable[Problem], *, tries: int | None = None) -> list[Found]:
    """Search each problem, with as much effort as `search` takes by itself or so many `tries`."""
    found = []
    for problem in problems:
        options = {
            "memory_cap": problem.cap,
            "costs": costs_of(problem),
            "placement": problem.placement,
            "split_backward": problem.backward == SPLIT,
        }
        sizes = problem.num_ranks, problem.num_microbatches
        bound = lower_bound(*sizes, **options)
        schedule = search(*sizes, tries=tries, **options)
        timeline = simulate(schedule, **asdict(options["costs"]))
        assert max(timeline.peak_live_per_rank) <= problem.cap, problem
        found.append(Found(problem, timeline.makespan, timeline.bubble, bound))
        print(*problem, f"{timeline.makespan:g} ({bound:g})", flush=True)
    return found


def page(found: Sequence[Found]) -> str:
    """Return `search.md`."""
    proved = sum(each.state.startswith("proved") for each in found)
    lines = [
        "# Makespans under a cap on activations",
        "",
        "Made by `python packages/olmo-pipeline/benchmarks`. Counts, not timings: the search has a "
        "fixed seed, so that every machine gets the same.",
        "",
        "Two chunks a rank. A forward costs 1 a stage, a split backward 1 for each of its halves, "
        "a whole one what the row says. Proved: `lower_bound` is reached, so that no schedule is "
        "better. Proved by a solver: CP-SAT found none better with microbatches in order. Best "
        f"found: nobody knows. {proved} of {len(found)} are proved.",
        "",
        "| ranks | microbatches | placement | backward | costs | cap "
        "| makespan | bubble | bound | state |",
        "|---" * 10 + "|",
    ]
    for each in found:
        given = " | ".join(map(str, each.problem))
        lines.append(
            f"| {given} | {each.makespan:g} | {100 * each.bubble:.1f} % | {each.bound:g} | "
            f"{each.state} |"
        )
    return "\n".join([*lines, ""])
