"""What a search starts from: the best of the constructions, under the cap and all smaller ones.

The constructions are the known patterns (`_patterns`) and the periodic orders
(`_periodic_orders`), these as they are and as due times of greedy walks. Each is tried in both
directions of time where backwards are whole (`turned`), under the given cap and under every smaller
one whose lower bound is still below the best found. The set for a cap thus holds that for each
smaller cap, and none of it is drawn at random: while the budget lasts, what it gives is never worse
under a larger cap.

Room that the lower bound has no use for is not constructed for: a cap above the least one at which
the bound is that of no cap counts as that one.
"""

import bisect
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ._bounds import least_makespan
from ._costs import Costs
from ._due_times import due_times
from ._list_scheduler import DueTimes, Problem, Rows, Walk
from ._patterns import known_patterns
from ._periodic_orders import PeriodicOrder, period_of, periodic_orders

# Slack in periods and patience in mean durations of the walks along a periodic order.
_STEERING = ((4.0, 0.0), (0.5, 0.0), (1.0, 0.0), (math.inf, 0.0), (4.0, 1.0), (1.0, 1.0))


class Budget:
    """What may still be walked: numbers of walks and of actions."""

    def __init__(self, walks: float, actions: float) -> None:
        self.walks, self.actions = walks, actions

    @property
    def is_spent(self) -> bool:
        """Say whether no walk is left."""
        return self.walks <= 0 or self.actions <= 0

    def walk(self, problem: Problem, due: DueTimes, limit: float) -> tuple[float, Rows]:
        """Walk; return makespan and order, infinity as soon as the makespan must exceed `limit`."""
        walk = Walk(problem, due)
        makespan = walk.run(limit=limit)
        self.walks -= 1
        self.actions -= sum(map(len, walk.rows))
        return makespan, walk.rows


@dataclass(frozen=True, slots=True)
class Found:
    """An order that was found.

    Args:
        problem: What it was found for: turned or not, under this cap or a smaller one.
        turned: Whether time runs backwards in it.
        makespan: Its makespan.
        rows: The order on every rank.
        due: Due times that a walk may start from, which gave the order or nearly.
    """

    problem: Problem
    turned: bool
    makespan: float
    rows: Rows
    due: DueTimes


def turn(problem: Problem) -> Problem:
    """Return the problem with time running backwards, in which a backward is a forward."""
    by_stage = problem.costs.by_stage(len(problem.rank_of_stage))
    costs = Costs(
        forward=by_stage.actions["backward"],
        backward=by_stage.actions["forward"],
        transfer=by_stage.transfer,
    )
    return dataclasses.replace(problem, costs=costs)


def turn_rows(problem: Problem, rows: Rows) -> Rows:
    """Return an order with time running the other way."""
    last = problem.num_microbatches - 1
    return [[(1 - kind, stage, last - index) for kind, stage, index in row[::-1]] for row in rows]


def best_start(problem: Problem, budget: Budget) -> Found | None:
    """Return the best construction, None if there is none; of equal ones that of the largest cap.

    Stops where the budget ends, or where a lower bound is reached.
    """
    best: Found | None = None
    tiny = 1e-6 * problem.unit
    for smaller in _smaller_caps(problem):
        bound = least_makespan(smaller) + tiny
        for turned in (False,) if problem.splits_backward else (False, True):
            posed = turn(smaller) if turned else smaller
            for due, order in _constructions(posed):
                limit = math.inf if best is None else best.makespan - 2 * tiny
                if limit <= bound or budget.is_spent:
                    return best
                if order is None:
                    makespan, rows = budget.walk(posed, due, limit)
                else:
                    makespan, rows = order.makespan, order.rows
                if makespan <= limit and makespan < math.inf:
                    best = Found(posed, turned, makespan, rows, due)
    return best


def _smaller_caps(problem: Problem) -> Iterator[Problem]:
    """Yield the problem under its caps, under caps less by one, and so on."""
    ranks = range(problem.num_ranks)
    least = tuple(map(problem.rank_of_stage.count, ranks))
    most = max(least) * problem.num_microbatches

    def under(cap: int) -> Problem:
        caps = tuple(max(cap, number) for number in least)
        return dataclasses.replace(problem, max_live=caps)

    free = least_makespan(under(most))
    ample = 1 + bisect.bisect_left(
        range(1, most), True, key=lambda cap: least_makespan(under(cap)) <= free
    )
    for less in range(ample):
        caps = (min(cap, ample) - less for cap in problem.max_live)
        caps = tuple(map(max, caps, least))
        yield dataclasses.replace(problem, max_live=caps)
        if caps == least:
            return


def _constructions(problem: Problem) -> Iterator[tuple[DueTimes, PeriodicOrder | None]]:
    """Yield due times to walk along, and orders to take as they are with theirs."""
    orders, period = periodic_orders(problem), period_of(problem)
    for order in orders:
        yield DueTimes(order.starts, period), order
    for pattern in known_patterns(problem):
        yield due_times(problem, pattern), None
    for slack, patience in _STEERING:
        for order in orders:
            yield DueTimes(order.starts, slack * period, patience * problem.unit), None
