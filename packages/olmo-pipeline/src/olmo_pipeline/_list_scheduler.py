"""Build a schedule by a greedy walk through time, under a cap on live activations, never stuck.

Whenever a rank is free it takes, of the actions that it may start, the one that is due first. Due
times are the only choice to make. Microbatches keep their order at every stage.

Memory. A forward is admitted only if the oldest microbatch that still has forwards to do on this
rank can do them all afterwards. With v stages and a cap of c on the rank, that is

    ( activations live on the rank of microbatches younger than that one )  <=  c - v

No rank can then wait for room for ever: where the oldest unfinished microbatch needs room, all that
is older has been freed, all that is younger leaves it v places, and younger ones never overtake it.
For orders that keep the microbatches in order the rule forbids nothing that could be finished, so a
cap of v is enough to run. (It is the banker's algorithm, E. W. Dijkstra, "Cooperating sequential
processes", 1965, with the order of completion known.)

A forward may also be held back until `slack` before it is due, so that it does not take room early,
and a rank may wait `patience` for an action that is due before the ones at hand.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ._costs import Costs
from ._schedule import Action, Kind, Schedule

WHOLE: tuple[Kind, ...] = ("forward", "backward")
SPLIT: tuple[Kind, ...] = ("forward", "input_gradient", "weight_gradient")
_TINY = 1e-9  # ends that are equal but for rounding, relative to the mean cost


@dataclass(frozen=True, slots=True)
class Problem:
    """What a schedule is wanted for.

    Args:
        rank_of_stage: The rank of each stage.
        num_microbatches: Microbatches m.
        costs: Costs of actions and messages.
        max_live: For each rank, the most activations; at least the number of its stages.
        splits_backward: Whether backwards are split into input and weight gradients.
    """

    rank_of_stage: tuple[int, ...]
    num_microbatches: int
    costs: Costs
    max_live: tuple[int, ...]
    splits_backward: bool
    kinds: tuple[Kind, ...] = field(init=False)
    durations: tuple[tuple[float, ...], ...] = field(init=False)  # by kind and stage
    delays: tuple[float, ...] = field(init=False)  # of a message between stages s and s + 1
    unit: float = field(init=False)  # mean duration

    def __post_init__(self) -> None:
        num_stages = len(self.rank_of_stage)
        by_stage = self.costs.by_stage(num_stages)
        kinds = SPLIT if self.splits_backward else WHOLE
        durations = tuple(by_stage.actions[kind] for kind in kinds)
        delays = tuple(
            delay if self.rank_of_stage[stage] != self.rank_of_stage[stage + 1] else 0.0
            for stage, delay in enumerate(by_stage.transfer)
        )
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "durations", durations)
        object.__setattr__(self, "delays", delays)
        total = math.fsum(map(math.fsum, durations))
        object.__setattr__(self, "unit", total / (len(kinds) * num_stages))

    @property
    def num_ranks(self) -> int:
        """Ranks P."""
        return len(self.max_live)

    def work_of(self, rank: int) -> float:
        """Return the time that all actions of `rank` take."""
        one = math.fsum(
            durations[stage]
            for durations in self.durations
            for stage, holder in enumerate(self.rank_of_stage)
            if holder == rank
        )
        return one * self.num_microbatches


@dataclass(frozen=True, slots=True)
class DueTimes:
    """When actions are due, see the module's text.

    Args:
        times: By kind (forward, backward or input gradient, weight gradient), stage, microbatch.
        slack: How long before it is due a forward may start.
        patience: How long a rank may wait for an action due before the ones at hand.
    """

    times: Sequence[Sequence[Sequence[float]]]
    slack: float = math.inf
    patience: float = 0.0


Rows = list[list[tuple[int, int, int]]]  # by rank: index of the kind, stage, microbatch


class Walk:
    """One greedy walk.

    Args:
        problem: What to schedule.
        due: When.
    """

    def __init__(self, problem: Problem, due: DueTimes) -> None:
        stages, count = problem.rank_of_stage, problem.num_microbatches
        self._problem = problem
        self._due = due
        self._tiny = _TINY * problem.unit
        self._last = len(problem.kinds) - 1  # the kind whose end frees the activation
        self._stages: list[list[int]] = [[] for _ in range(problem.num_ranks)]
        for stage, rank in enumerate(stages):
            self._stages[rank].append(stage)
        self._next = [[0] * len(stages) for _ in problem.kinds]  # microbatch, by kind and stage
        # When the input of a forward and of a backward is there.
        self._ready = [[[math.inf] * count for _ in stages] for _ in range(2)]
        self._ready[0][0] = [0.0] * count
        self._live = [0] * problem.num_ranks
        self._free = [0.0] * problem.num_ranks
        self.rows: Rows = [[] for _ in range(problem.num_ranks)]

    def run(self, limit: float = math.inf) -> float:
        """Fill `rows` and return the makespan, or infinity as soon as it must exceed `limit`."""
        problem = self._problem
        left = [problem.work_of(rank) for rank in range(problem.num_ranks)]
        limit += self._tiny
        events = [(0.0, rank) for rank in range(problem.num_ranks)]
        while events:
            now, rank = heapq.heappop(events)
            if now < self._free[rank]:
                continue
            if now + left[rank] > limit:
                return math.inf
            chosen, wake = self._choose(rank, now)
            if chosen is None:
                if wake < math.inf:
                    heapq.heappush(events, (wake, rank))
                continue
            kind, stage, _ = chosen
            duration = problem.durations[kind][stage]
            left[rank] -= duration
            end = self._free[rank] = now + duration
            heapq.heappush(events, (end, rank))
            told = self._perform(rank, chosen, end)
            if told is not None:
                other, arrival = told
                heapq.heappush(events, (max(arrival, self._free[other]), other))
        count = problem.num_microbatches
        assert all(index == count for kind in self._next for index in kind), "a walk got stuck"
        return max(self._free)

    def _choose(self, rank: int, now: float) -> tuple[tuple[int, int, int] | None, float]:
        """Return the action to start now, if any, and when to look again if there is none."""
        count, due, soon = self._problem.num_microbatches, self._due, now + self._tiny
        first, chosen, wake = math.inf, None, math.inf
        later: list[tuple[float, float]] = []  # when it can start, when it is due
        for stage in self._stages[rank]:
            for kind in range(self._last + 1):
                index = self._next[kind][stage]
                if index == count:
                    continue
                wanted = due.times[kind][stage][index]
                if kind == 2:
                    start = 0.0 if index < self._next[1][stage] else math.inf
                else:
                    start = self._ready[kind][stage][index]
                    if kind == 0 and start < math.inf:
                        start = max(start, wanted - due.slack)
                        if not self._admits(rank, index):
                            continue
                if start <= soon:
                    if wanted < first:
                        first, chosen = wanted, (kind, stage, index)
                elif start < math.inf:
                    later.append((start, wanted))
                    wake = min(wake, start)
        if due.patience > 0 and chosen is not None:
            waits = [s for s, wanted in later if wanted < first and s <= soon + due.patience]
            if waits:
                return None, min(waits)
        return chosen, wake

    def _admits(self, rank: int, index: int) -> bool:
        cap = self._problem.max_live[rank]
        if self._live[rank] >= cap:
            return False
        stages, forwards, freed = self._stages[rank], self._next[0], self._next[self._last]
        oldest = min([forwards[stage] for stage in stages])
        if index == oldest:
            return True
        younger = 1
        for stage in stages:
            younger += max(0, forwards[stage] - max(oldest + 1, freed[stage]))
        return younger + len(stages) <= cap

    def _perform(
        self, rank: int, chosen: tuple[int, int, int], end: float
    ) -> tuple[int, float] | None:
        """Note an action; return which rank gets its output and when, if another rank does."""
        kind, stage, index = chosen
        self.rows[rank].append(chosen)
        self._next[kind][stage] += 1
        self._live[rank] += (kind == 0) - (kind == self._last)
        if kind == 2:
            return None
        last_stage = len(self._problem.rank_of_stage) - 1
        if kind == 0 and stage == last_stage:
            self._ready[1][stage][index] = end
            return None
        following = stage + (1 if kind == 0 else -1)
        if following < 0:
            return None
        arrival = end + self._problem.delays[min(stage, following)]
        self._ready[kind][following][index] = arrival
        other = self._problem.rank_of_stage[following]
        return None if other == rank else (other, arrival)


def as_schedule(problem: Problem, rows: Rows, name: str) -> Schedule:
    """Return the rows of a walk as a schedule."""
    return Schedule(
        num_ranks=problem.num_ranks,
        num_stages=len(problem.rank_of_stage),
        num_microbatches=problem.num_microbatches,
        actions=tuple(
            tuple(Action(problem.kinds[kind], stage, index) for kind, stage, index in row)
            for row in rows
        ),
        rank_of_stage=problem.rank_of_stage,
        name=name,
    )
