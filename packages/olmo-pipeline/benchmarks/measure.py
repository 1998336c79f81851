"""Simulate every schedule for many sizes, with forward, input and weight gradient 1 unit a stage.

A stage of a schedule with one chunk a rank holds twice the layers of one with two chunks. Its
actions are therefore given 2 units each, so that times compare; its activations count double, too.
"""

from collections.abc import Callable
from typing import NamedTuple

from olmo_pipeline import (
    Costs,
    Schedule,
    dual_pipe_v,
    gpipe,
    interleaved_one_f_one_b,
    lower_bound,
    one_f_one_b,
    search,
    simulate,
    v_shape,
    zero_bubble,
)

RANKS = (2, 3, 4, 6, 8, 12, 16)
MICROBATCHES = (4, 8, 16, 32, 64)


class Row(NamedTuple):
    """One schedule at one size. Times in units, activations in stages of two chunks a rank."""

    schedule: str
    num_ranks: int
    num_microbatches: int
    idle: float  # makespan less the work of a rank
    bubble: float  # idle share
    peak: int  # the most activations on any rank
    published_idle: float | None
    published_peak: int | None
    bound: float | None  # of the makespan under the cap, for schedules that were searched
    makespan: float


class Contender(NamedTuple):
    """How to build a schedule, and what is published of it, by ranks P and microbatches m."""

    name: str
    num_chunks: int
    build: Callable[[int, int], Schedule]
    idle: Callable[[int, int], float | None]  # with F = I = W = 1 for two chunks, 2 for one
    peak: Callable[[int, int], int | None]
    valid: Callable[[int, int], bool] = lambda p, m: True  # where the published formula holds


CONTENDERS = (
    Contender("gpipe", 1, gpipe, lambda p, m: 6 * (p - 1), lambda p, m: 2 * m),
    Contender("1f1b", 1, one_f_one_b, lambda p, m: 6 * (p - 1), lambda p, m: 2 * min(p, m)),
    Contender(
        "interleaved, 2 chunks",
        2,
        lambda p, m: interleaved_one_f_one_b(p, m, 2),
        lambda p, m: 3 * (p - 1),
        lambda p, m: 3 * p - 1,
        lambda p, m: m % p == 0 and m > p,
    ),
    Contender("v_shape", 2, v_shape, lambda p, m: None, lambda p, m: None),
    Contender(
        "zero_bubble h1",
        1,
        lambda p, m: zero_bubble(p, m, "h1"),
        lambda p, m: 2 * (p - 1),
        lambda p, m: 2 * p,
        lambda p, m: m >= p,
    ),
    Contender(
        "zero_bubble v",
        2,
        lambda p, m: zero_bubble(p, m, "v"),
        lambda p, m: p - 1,  # published 0, without the stagger of P - 1 units
        lambda p, m: 2 * p,
        lambda p, m: m >= 2 * p,
    ),
    Contender(
        "dual_pipe_v",
        2,
        dual_pipe_v,
        lambda p, m: 2 * (p - 1),
        lambda p, m: 2 * p + 1,
        lambda p, m: m >= 2 * p,
    ),
)
SEARCHED = (  # name, whether the backward is split, cap by number of ranks
    ("search, whole, cap P+2", False, lambda p: p + 2),
    ("search, whole, cap 3P/2", False, lambda p: 3 * p // 2 + p % 2),
    ("search, whole, cap 2P", False, lambda p: 2 * p),
    ("search, split, cap P+2", True, lambda p: p + 2),
    ("search, split, cap 3P/2", True, lambda p: 3 * p // 2 + p % 2),
    ("search, split, cap 2P", True, lambda p: 2 * p),
)


def measure_all() -> list[Row]:
    """Return all rows, printing progress."""
    rows = []
    for num_ranks in RANKS:
        for count in MICROBATCHES:
            rows += [_measure(contender, num_ranks, count) for contender in CONTENDERS]
            for name, split, cap in SEARCHED:
                rows.append(_search(name, num_ranks, count, split, max(2, cap(num_ranks))))
            print(f"{num_ranks} ranks, {count} microbatches", flush=True)
    return rows


def _measure(contender: Contender, num_ranks: int, count: int) -> Row:
    scale = 3 - contender.num_chunks  # a stage of one chunk a rank is two of two chunks
    timeline = simulate(
        contender.build(num_ranks, count), forward=1.0 * scale, backward=2.0 * scale
    )
    published = contender.valid(num_ranks, count)
    return Row(
        contender.name,
        num_ranks,
        count,
        timeline.makespan - 6 * count,
        timeline.bubble,
        scale * max(timeline.peak_live_per_rank),
        contender.idle(num_ranks, count) if published else None,
        contender.peak(num_ranks, count) if published else None,
        None,
        timeline.makespan,
    )


def _search(name: str, num_ranks: int, count: int, split: bool, cap: int) -> Row:
    options = {"memory_cap": cap, "costs": Costs(), "split_backward": split}
    bound = lower_bound(num_ranks, count, **options)
    timeline = simulate(search(num_ranks, count, tries=400, **options))
    peak = max(timeline.peak_live_per_rank)
    idle = timeline.makespan - 6 * count
    makespan = timeline.makespan
    return Row(name, num_ranks, count, idle, timeline.bubble, peak, None, None, bound, makespan)
