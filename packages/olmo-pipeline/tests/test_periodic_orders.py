"""Periodic orders on the V, and what a search makes of them where costs are unequal."""

import dataclasses
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_pipeline import Costs, lower_bound, search, simulate, validate
from olmo_pipeline._list_scheduler import Problem, Walk, as_schedule
from olmo_pipeline._periodic_orders import periodic_orders
from olmo_pipeline._placement import place_stages
from olmo_pipeline._starts import Budget, _smaller_caps, best_start, turn_rows


def _problem(num_ranks, num_microbatches, cap, costs=None, **changes):
    options = {
        "rank_of_stage": place_stages(num_ranks, 2, "v"),
        "num_microbatches": num_microbatches,
        "costs": costs or Costs(),
        "max_live": (cap,) * num_ranks,
        "splits_backward": False,
    }
    return Problem(**(options | changes))


def _makespan(schedule, costs):
    options = {field.name: getattr(costs, field.name) for field in dataclasses.fields(costs)}
    return simulate(schedule, **options).makespan


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "cap", "makespan"),
    [(4, 8, 6, 66), (8, 64, 12, 426), (16, 64, 22, 474)],
)
def test_orders_where_a_backward_costs_twice_a_forward(num_ranks, num_microbatches, cap, makespan):
    problem = _problem(num_ranks, num_microbatches, cap)
    order = periodic_orders(problem)[0]
    schedule = as_schedule(problem, order.rows, "block")
    validate(schedule, max_live=cap)
    assert simulate(schedule).makespan == order.makespan == makespan


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_order_is_valid_and_as_early_as_it_says(data):
    num_ranks, count = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    cap = data.draw(st.integers(num_ranks + 1, 3 * num_ranks + 3))
    cost = st.lists(st.integers(1, 4), min_size=2 * num_ranks, max_size=2 * num_ranks)
    costs = Costs(
        forward=data.draw(st.one_of(st.just(1.0), cost)),
        backward=data.draw(st.one_of(st.sampled_from([1.0, 1.7, 2.0, 3.0]), cost)),
        transfer=data.draw(st.sampled_from([0.0, 0.25, 1.0])),
    )
    problem = _problem(num_ranks, count, cap, costs)
    for order in periodic_orders(problem):
        schedule = as_schedule(problem, order.rows, "block")
        validate(schedule, max_live=cap)
        timeline = simulate(
            schedule, forward=costs.forward, backward=costs.backward, transfer=costs.transfer
        )
        assert timeline.makespan == pytest.approx(order.makespan)
        kinds = {"forward": 0, "backward": 1}
        for _, action, start, _ in timeline.spans:
            said = order.starts[kinds[action.kind]][action.stage][action.microbatch]
            assert said == pytest.approx(start, abs=1e-6)


def test_the_busiest_rank_never_idles_between_its_ends():
    """Each microbatch more costs one period, the work of a rank for one microbatch."""
    for costs in (Costs(), Costs(forward=1.0, backward=1.7), Costs(transfer=0.5)):
        short, long = (periodic_orders(_problem(4, m, 8, costs))[0] for m in (20, 27))
        period = 2 * (costs.forward + costs.backward)
        assert long.makespan - short.makespan == pytest.approx(7 * period)


@pytest.mark.parametrize(
    "changes",
    [
        {"splits_backward": True},
        {"rank_of_stage": place_stages(4, 2, "loop")},
        {"rank_of_stage": place_stages(4, 3, "v")},
        {"max_live": (4,) * 4},
    ],
    ids=["split", "loop", "zigzag", "no room"],
)
def test_there_are_none_elsewhere(changes):
    assert periodic_orders(_problem(4, 8, 8))
    assert periodic_orders(_problem(4, 8, 8, **changes)) == []


@pytest.mark.parametrize(("num_ranks", "cap", "most"), [(8, 12, 425), (16, 22, 474), (16, 24, 474)])
def test_the_search_starts_from_them(num_ranks, cap, most):
    """Without them, ten times as many walks found 428, 510 and 482 under the first three."""
    schedule = search(num_ranks, 64, memory_cap=cap, tries=40)
    validate(schedule, max_live=cap)
    makespan = simulate(schedule).makespan
    assert lower_bound(num_ranks, 64, memory_cap=cap) <= makespan <= most


@pytest.mark.parametrize("costs", [Costs(), Costs(forward=1.0, backward=3.0, transfer=0.5)])
def test_what_a_search_starts_from_is_never_worse_under_a_larger_cap(costs):
    makespans = []
    for cap in range(2, 14):
        start = best_start(_problem(4, 6, cap, costs), Budget(math.inf, math.inf))
        schedule = as_schedule(start.problem, start.rows, "start")
        if start.turned:
            schedule = as_schedule(start.problem, turn_rows(start.problem, start.rows), "start")
        validate(schedule, max_live=cap)
        assert _makespan(schedule, costs) <= start.makespan + 1e-6
        makespans.append(start.makespan)
    assert makespans == sorted(makespans, reverse=True)
    assert len(set(makespans)) > 3


def test_what_is_tried_under_a_cap_holds_what_is_tried_under_smaller_ones():
    tried = [
        [problem.max_live for problem in _smaller_caps(_problem(4, 6, cap))] for cap in range(2, 13)
    ]
    for fewer, more in pairwise(tried):
        assert more in (fewer, [more[0], *fewer])
    assert tried[4] == [(cap,) * 4 for cap in (6, 5, 4, 3, 2)]
    assert tried[-1] == tried[-2], "the bound has no use for more"
    uneven = _problem(3, 6, 4, max_live=(4, 3, 2))
    assert [p.max_live for p in _smaller_caps(uneven)] == [(4, 3, 2), (3, 2, 2), (2, 2, 2)]


def test_a_search_under_a_larger_cap_is_not_worse():
    makespans = [
        simulate(search(8, 64, memory_cap=cap, tries=30)).makespan for cap in (11, 12, 14, 16)
    ]
    assert makespans == sorted(makespans, reverse=True)


def test_a_search_ends_after_a_number_of_actions(monkeypatch):
    walked, run = [], Walk.run

    def counted(walk, limit=math.inf):
        makespan = run(walk, limit=limit)
        walked.append(sum(map(len, walk.rows)))
        return makespan

    monkeypatch.setattr(Walk, "run", counted)
    monkeypatch.setattr("olmo_pipeline._search._EFFORT", 50_000)
    search(8, 64, memory_cap=12)
    *searched, _ = walked  # the last is that of `v_shape`
    assert sum(searched[:-1]) < 50_000 <= sum(searched)
