import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_pipeline import Costs, simulate, validate
from olmo_pipeline._bounds import least_makespan
from olmo_pipeline._list_scheduler import DueTimes, Problem, Walk, as_schedule
from olmo_pipeline._simulate import lay_out
from olmo_pipeline._starts import turn, turn_rows


def _floats(least, most, length):
    return st.lists(st.integers(least, most).map(float), min_size=length, max_size=length)


@st.composite
def _problems(draw, split=None):
    """Any placement, costs and cap that leave each stage of a rank one activation."""
    num_ranks, num_stages = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    holders = st.lists(st.integers(0, num_ranks - 1), min_size=num_stages, max_size=num_stages)
    place = tuple(draw(holders))
    more = st.lists(st.integers(0, 3), min_size=num_ranks, max_size=num_ranks)
    return Problem(
        rank_of_stage=place,
        num_microbatches=draw(st.integers(1, 6)),
        costs=Costs(
            forward=draw(_floats(1, 4, num_stages)),
            backward=draw(_floats(1, 4, num_stages)),
            input_gradient=draw(_floats(1, 4, num_stages)),
            weight_gradient=draw(_floats(1, 4, num_stages)),
            transfer=draw(_floats(0, 2, num_stages - 1)),
        ),
        max_live=tuple(max(1, place.count(r)) + extra for r, extra in enumerate(draw(more))),
        splits_backward=draw(st.booleans()) if split is None else split,
    )


@st.composite
def _due_times(draw, problem):
    row = _floats(0, 60, problem.num_microbatches)
    stages = st.lists(row, min_size=len(problem.rank_of_stage), max_size=len(problem.rank_of_stage))
    return DueTimes(
        [draw(stages) for _ in problem.kinds],
        slack=draw(st.sampled_from([0.0, 3.0, math.inf])),
        patience=draw(st.sampled_from([0.0, 2.0])),
    )


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_due_times_give_a_schedule_under_the_cap(data):
    problem = data.draw(_problems())
    due = data.draw(_due_times(problem))
    walk = Walk(problem, due)
    makespan = walk.run()
    schedule = as_schedule(problem, walk.rows, "walk")
    validate(schedule, max_live=problem.max_live)
    timeline = lay_out(schedule, problem.costs)
    assert timeline.makespan <= makespan + 1e-9
    if due.slack == math.inf and due.patience == 0.0:
        assert timeline.makespan == pytest.approx(makespan)
    assert least_makespan(problem) <= timeline.makespan + 1e-9
    for row in schedule.actions:
        last = {}
        for action in row:
            key = (action.kind, action.stage)
            assert action.microbatch == last.get(key, -1) + 1
            last[key] = action.microbatch


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_walk_stops_when_it_cannot_win(data):
    problem = data.draw(_problems())
    due = data.draw(_due_times(problem))
    makespan = Walk(problem, due).run()
    assert Walk(problem, due).run(limit=makespan) == makespan
    assert Walk(problem, due).run(limit=makespan - 0.5) in (math.inf, makespan)
    assert Walk(problem, due).run(limit=least_makespan(problem) / 100) == math.inf


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_no_schedule_beats_the_bound(any_split_schedule, data):
    """Not even one from a random order, under the cap that it happens to need."""
    schedule = data.draw(any_split_schedule)
    kinds = {action.kind for row in schedule.actions for action in row}
    if {"backward", "input_gradient"} <= kinds:
        return
    count = schedule.num_stages
    costs = {
        name: data.draw(_floats(1, 4, count))
        for name in ("forward", "backward", "input_gradient", "weight_gradient")
    }
    timeline = simulate(schedule, **costs, transfer=1.0)
    problem = Problem(
        rank_of_stage=schedule.rank_of_stage,
        num_microbatches=schedule.num_microbatches,
        costs=Costs(**costs, transfer=1.0),
        max_live=tuple(max(1, peak) for peak in timeline.peak_live_per_rank),
        splits_backward=schedule.splits_backward,
    )
    assert least_makespan(problem) <= timeline.makespan + 1e-9


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_walk_back_through_time_is_a_schedule(data):
    problem = data.draw(_problems(split=False))
    turned = turn(problem)
    walk = Walk(turned, data.draw(_due_times(turned)))
    makespan = walk.run()
    schedule = as_schedule(problem, turn_rows(problem, walk.rows), "turned")
    validate(schedule, max_live=problem.max_live)
    assert lay_out(schedule, problem.costs).makespan <= makespan + 1e-9
    assert least_makespan(problem) == pytest.approx(least_makespan(turned))
