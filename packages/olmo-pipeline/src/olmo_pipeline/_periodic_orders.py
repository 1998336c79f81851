"""Periodic orders on the V, built rank by rank: starts for a search where costs are unequal.

Rank r of the V does four actions a microbatch: with stages a = r and z = 2 P - 1 - r they are F(a),
F(z), B(z) and B(a). A *building block* says when the first microbatch has each of them, on every
rank; microbatch i has them i periods later. The period is the work of the busiest rank for one
microbatch, so that this rank idles at the ends only. P. Qi et al., "Pipeline Parallelism with
Controllable Memory", 2024, read the memory off such a block: lifetimes over the period.

Which blocks are there? Count the times of a rank from its F(a): f, b, e for F(z), B(z), B(a).
Modulo the period the four actions must not overlap. That leaves 3! = 6 orders of them around the
period, for any costs. One of them, F = 1, B = 2, period 6:

    F(a) B(z) B(z) F(z) B(a) B(a)        f = 3, b = 1, e = 4, each and any number of periods more

(Where a rank has less work than the busiest, the time left stands before or after one of them.)
Messages must come in time. With primes for rank r + 1, d and d' for the messages of stages a and z,
and i for how much later rank r + 1 starts:

    F(a) + d           <=  i                   i + f' + F(z - 1) + d'  <=  f
    b + B(z) + d'      <=  i + b'              i + e' + B(a + 1) + d   <=  e

There is such an i if each lower end is below each upper end. From rank P - 1, where the chain
turns, to rank 0 the time from f to b shrinks and e grows, and what remains to be chosen is an order
and some whole periods a rank: a dynamic program from rank P - 1 to rank 0, whose states are
(f, b, e). A state that keeps more than the cap is dropped. The least f and e of an order are the
best ones; for b the latest and the one a period before are tried.

A block repeated for m microbatches gives each rank an order. In that order everything then starts
as soon as it can, which pulls the ends of the schedule together.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ._list_scheduler import Problem, Rows

_MOST_STATES = 200  # of a rank; more are thinned out evenly
_MOST_ORDERS = 4  # with the shortest chain
_TINY = 1e-9  # of a period

_State = tuple[float, float, float]  # f, b, e
_Layer = dict[_State, tuple[_State | None, float]]  # the state of the rank after it, i
Times = tuple[tuple[tuple[float, ...], ...], ...]  # starts by kind, stage, microbatch


@dataclass(frozen=True, slots=True)
class PeriodicOrder:
    """The order of a block on every rank, and when its actions start at the earliest."""

    rows: Rows
    starts: Times
    makespan: float


def period_of(problem: Problem) -> float:
    """Return the work of the busiest rank for one microbatch."""
    return max(map(problem.work_of, range(problem.num_ranks))) / problem.num_microbatches


def periodic_orders(problem: Problem) -> list[PeriodicOrder]:
    """Return orders that keep the cap and the busiest rank busy; the one of least makespan first.

    Empty if the problem is not one of whole backwards and two chunks on the V, or if the cap leaves
    room for no block.
    """
    ranks = range(problem.num_ranks)
    if problem.splits_backward or problem.rank_of_stage != (*ranks, *ranks[::-1]):
        return []
    layers = _Blocks(problem).layers()
    if not layers[-1]:
        return []
    last = problem.durations[1][0]
    ends = sorted(layers[-1], key=lambda state: state[2] + last)[:_MOST_ORDERS]
    orders = [_repeat(problem, _offsets(layers, end)) for end in ends]
    return sorted(orders, key=lambda order: order.makespan)


class _Blocks:
    """The dynamic program of the module's text."""

    def __init__(self, problem: Problem) -> None:
        self._caps = problem.max_live
        self._forward, self._backward = problem.durations
        self._delays = problem.delays
        self._period = period_of(problem)
        # From the start of F(z) to the earliest start of B(z), by rank.
        last = len(self._forward) - 1
        self._returns = [self._forward[last]]
        for rank in range(1, problem.num_ranks):
            z = last - rank
            there = self._forward[z] + self._delays[z]
            back = self._backward[z + 1] + self._delays[z]
            self._returns.append(there + self._returns[-1] + back)

    def layers(self) -> list[_Layer]:
        """Return the states of rank P - 1, P - 2, .., 0, or up to the first rank without one."""
        layers = [self._turn()]
        for rank in range(len(self._caps) - 2, -1, -1):
            layer: _Layer = {}
            for state in layers[-1]:
                for earlier, shift in self._steps(rank, state):
                    if earlier not in layer and self._fits(rank, earlier):
                        layer[earlier] = state, shift
            layers.append(_thin_out(layer))
            if not layer:
                break
        return layers

    def _turn(self) -> _Layer:
        """Return the states of rank P - 1."""
        rank = len(self._caps) - 1
        forward, _, backward, _ = self._durations(rank)
        layer: _Layer = {}
        for order in self._orders(rank):
            f = self._at_least(forward, order[0])
            b = self._at_least(f + self._returns[rank], order[1])
            for _ in range(self._caps[rank]):
                state = f, b, self._at_least(b + backward, order[2])
                if self._fits(rank, state):
                    layer[state] = None, 0.0
                b += self._period
        return layer

    def _steps(self, rank: int, state: _State) -> Iterator[tuple[_State, float]]:
        """Yield the states of `rank` that feed `state` of the rank after it, with their i."""
        later_f, later_b, later_e = state
        a, z = rank, len(self._forward) - 1 - rank
        there, back = self._delays[a], self._delays[z - 1]
        least = self._forward[a] + there
        for order in self._orders(rank):
            f = self._at_least(least + later_f + self._forward[z - 1] + back, order[0])
            most = f - later_f - self._forward[z - 1] - back
            b = self._at_most(most + later_b - self._backward[z] - back, order[1])
            for b in (b, b - self._period):  # noqa: B020
                if b < f + self._returns[rank] - _TINY * self._period:
                    break
                shift = max(least, b + self._backward[z] + back - later_b)
                e = self._at_least(shift + later_e + self._backward[a + 1] + there, order[2])
                yield (f, b, e), shift

    def _durations(self, rank: int) -> tuple[float, float, float, float]:
        z = len(self._forward) - 1 - rank
        return self._forward[rank], self._forward[z], self._backward[z], self._backward[rank]

    def _orders(self, rank: int) -> list[_State]:
        """Return f, b and e of every order around the period, in [0, period)."""
        durations = self._durations(rank)
        left = self._period - sum(durations)
        orders: dict[_State, None] = {}
        for order in itertools.permutations((1, 2, 3)):
            for gap in range(4) if left > _TINY * self._period else (3,):
                time, starts = durations[0], [0.0] * 4
                for position, action in enumerate(order):
                    time += left if position == gap else 0.0
                    starts[action] = time
                    time += durations[action]
                orders[starts[1], starts[2], starts[3]] = None
        return list(orders)

    def _fits(self, rank: int, state: _State) -> bool:
        """Say whether a rank with this block, repeated for ever, keeps no more than its cap."""
        f, b, e = state
        _, _, second, first = self._durations(rank)
        lives = (0.0, e + first), (f, b + second)
        peak = max(sum(self._live(life, start) for life in lives) for start, _ in lives)
        return peak <= self._caps[rank]

    def _live(self, life: tuple[float, float], time: float) -> int:
        """Return how many repetitions of `life` there are at `time`, ends not counted."""
        start, end = ((time - bound) / self._period for bound in life)
        return math.floor(start + _TINY) - math.floor(end + _TINY)

    def _at_least(self, time: float, start: float) -> float:
        return start + self._period * math.ceil((time - start) / self._period - _TINY)

    def _at_most(self, time: float, start: float) -> float:
        return start + self._period * math.floor((time - start) / self._period + _TINY)


def _thin_out(layer: _Layer) -> _Layer:
    """Keep at most `_MOST_STATES`, evenly from the shortest chain to the longest."""
    if len(layer) <= _MOST_STATES:
        return layer
    states = sorted(layer, key=lambda state: state[2])
    last = len(states) - 1
    places = [last * number // (_MOST_STATES - 1) for number in range(_MOST_STATES)]
    return {states[place]: layer[states[place]] for place in places}


def _offsets(layers: list[_Layer], state: _State) -> list[list[float]]:
    """Return the starts of microbatch 0 by kind and stage, from `state` of rank 0."""
    num_ranks, start = len(layers), 0.0
    last = 2 * num_ranks - 1
    offsets = [[0.0] * (last + 1) for _ in range(2)]
    for rank in range(num_ranks):
        f, b, e = state
        offsets[0][rank], offsets[0][last - rank] = start, start + f
        offsets[1][rank], offsets[1][last - rank] = start + e, start + b
        following, shift = layers[num_ranks - 1 - rank][state]
        if following is not None:
            state, start = following, start + shift
    return offsets


def _repeat(problem: Problem, offsets: list[list[float]]) -> PeriodicOrder:
    """Return the order of all microbatches, a period apart, with everything as early as it can."""
    period, count = period_of(problem), problem.num_microbatches
    timed = sorted(
        (offset + period * index, kind, stage, index)
        for kind, row in enumerate(offsets)
        for stage, offset in enumerate(row)
        for index in range(count)
    )
    rows: Rows = [[] for _ in range(problem.num_ranks)]
    free = [0.0] * problem.num_ranks
    starts = [[[0.0] * count for _ in row] for row in offsets]
    ends = [[[0.0] * count for _ in row] for row in offsets]
    last = len(problem.rank_of_stage) - 1
    # What an action needs starts earlier in the block, so it has been placed already.
    for _, kind, stage, index in timed:
        rank, ready = problem.rank_of_stage[stage], 0.0
        if kind == 0 and stage > 0:
            ready = ends[0][stage - 1][index] + problem.delays[stage - 1]
        elif kind == 1 and stage < last:
            ready = ends[1][stage + 1][index] + problem.delays[stage]
        elif kind == 1:
            ready = ends[0][stage][index]
        starts[kind][stage][index] = max(ready, free[rank])
        free[rank] = max(ready, free[rank]) + problem.durations[kind][stage]
        ends[kind][stage][index] = free[rank]
        rows[rank].append((kind, stage, index))
    return PeriodicOrder(rows, tuple(tuple(map(tuple, row)) for row in starts), max(free))
