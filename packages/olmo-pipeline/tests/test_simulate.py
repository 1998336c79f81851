import heapq
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_pipeline import (
    Action,
    dual_pipe_v,
    interleaved_one_f_one_b,
    one_f_one_b,
    simulate,
    v_shape,
    zero_bubble,
)

BACKWARDS = ("backward", "input_gradient")
HALVES = ("input_gradient", "weight_gradient")


def _followers(action, last):
    """Return all actions that may wait for this one; those not in the schedule never start."""
    index = action.microbatch
    if action.kind == "forward" and action.stage < last:
        return [Action("forward", action.stage + 1, index)]
    if action.kind == "weight_gradient":
        return []
    stage = action.stage - (action.kind != "forward")
    following = [Action(kind, stage, index) for kind in BACKWARDS if stage >= 0]
    if action.kind == "input_gradient":
        following.append(Action("weight_gradient", action.stage, index))
    return following


def _events(schedule, costs, transfer):
    """Count by events, another way than `simulate`: a clock, arrivals and a queue of completions.

    Returns makespan and, per rank, the most activations that were alive at once in time.
    """
    queues = [list(row) for row in schedule.actions]
    arrivals = {rank: set() for rank in range(schedule.num_ranks)}
    arrivals[schedule.rank_of_stage[0]] |= {
        Action("forward", 0, i) for i in range(schedule.num_microbatches)
    }
    running = [False] * schedule.num_ranks
    alive, most = [0] * schedule.num_ranks, [0] * schedule.num_ranks
    events, ticket, clock = [], 0, 0.0

    def start_what_can():
        nonlocal ticket
        for rank, queue in enumerate(queues):
            if not running[rank] and queue and queue[0] in arrivals[rank]:
                action = queue.pop(0)
                running[rank] = True
                cost = costs[action.kind][action.stage]
                if action.kind == "forward":
                    alive[rank] += 1
                    most[rank] = max(most[rank], alive[rank])
                heapq.heappush(events, (clock + cost, ticket, "end", rank, action))
                ticket += 1

    start_what_can()
    makespan = 0.0
    while events:
        clock, _, what, rank, action = heapq.heappop(events)
        if what == "arrive":
            arrivals[rank].add(action)
        else:
            makespan = clock
            running[rank] = False
            if action.kind in ("backward", "weight_gradient"):
                alive[rank] -= 1
            for other in _followers(action, schedule.num_stages - 1):
                to = schedule.rank_of_stage[other.stage]
                pair = min(action.stage, other.stage)
                delay = 0.0 if to == rank else transfer[pair]
                heapq.heappush(events, (clock + delay, ticket, "arrive", to, other))
                ticket += 1
        if not events or events[0][0] > clock:
            start_what_can()
    assert not any(queues)
    return makespan, tuple(most)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_simulate_equals_a_count_by_events(any_split_schedule, data):
    small = st.integers(1, 4), st.integers(1, 6)
    schedule = data.draw(
        st.one_of(
            any_split_schedule,
            st.builds(interleaved_one_f_one_b, *small, st.integers(1, 3)),
            st.builds(zero_bubble, *small, st.sampled_from(["h1", "v"])),
            st.builds(dual_pipe_v, *small),
            st.builds(v_shape, *small),
        )
    )
    count = schedule.num_stages
    stages = st.lists(st.integers(1, 5).map(float), min_size=count, max_size=count)
    costs = {kind: data.draw(stages) for kind in ("forward", "backward", *HALVES)}
    delays = st.integers(0, 4).map(lambda halves: halves / 2)
    transfer = data.draw(st.lists(delays, min_size=count - 1, max_size=count - 1))
    timeline = simulate(schedule, **costs, transfer=transfer)
    makespan, most = _events(schedule, costs, transfer)
    assert timeline.makespan == makespan
    assert timeline.peak_live_per_rank == most
    work = sum(costs[a.kind][a.stage] for row in schedule.actions for a in row)
    assert timeline.bubble == pytest.approx(1 - work / (schedule.num_ranks * makespan), abs=1e-12)
    for rank, peak in enumerate(most):
        steps = timeline.live_over_time(rank)
        assert (steps[-1][1], max(live for _, live in steps)) == (0, peak)
        assert all(a[0] < b[0] and a[1] != b[1] for a, b in pairwise(steps))


def test_live_activations_over_time():
    timeline = simulate(one_f_one_b(2, 2))
    # F0.0 [0, 1], F0.1 [1, 2], B0.0 [4, 6], B0.1 [7, 9]
    assert timeline.live_over_time(0) == ((0.0, 1), (1.0, 2), (6.0, 1), (9.0, 0))
    assert timeline.live_over_time(1) == ((0.0, 0), (1.0, 1), (7.0, 0))
    split = simulate(zero_bubble(1, 1), input_gradient=2.0, weight_gradient=3.0)
    assert split.live_over_time(0) == ((0.0, 1), (6.0, 0))


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_spans_hold_every_action_once_and_never_overlap(any_schedule, data):
    schedule = data.draw(any_schedule)
    timeline = simulate(schedule, forward=2.0, backward=3.0)
    for rank, row in enumerate(schedule.actions):
        spans = [span for span in timeline.spans if span.rank == rank]
        assert [span.action for span in spans] == list(row)
        for span in spans:
            assert span.end - span.start == (2.0 if span.action.kind == "forward" else 3.0)
        for before, after in pairwise(spans):
            assert before.end <= after.start


def test_halves_of_a_backward_cost_what_is_left():
    def makespan(**options):
        return simulate(zero_bubble(1, 1), forward=1.0, **options).makespan

    assert makespan(backward=3.0) == 4.0
    assert makespan(backward=3.0, input_gradient=1.0) == 4.0
    assert makespan(backward=3.0, weight_gradient=0.5) == 4.0
    assert makespan(input_gradient=5.0, weight_gradient=0.5) == 6.5
    assert simulate(zero_bubble(2, 1), backward=2.0, input_gradient=1.5).makespan == 5.5


def test_a_transfer_delays_other_ranks_only():
    assert simulate(one_f_one_b(2, 1), transfer=0.5).makespan == 1 + 0.5 + 1 + 2 + 0.5 + 2
    assert simulate(interleaved_one_f_one_b(1, 1, 2), transfer=0.5).makespan == 6.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": 0.0}, "`forward` must be positive and finite, got 0.0"),
        ({"backward": float("nan")}, "`backward` must be positive and finite, got nan"),
        ({"forward": [1.0]}, r"`forward` must be one number or one per stage \(2\), got 1"),
        ({"transfer": -1.0}, "`transfer` must be finite and not below 0, got -1.0"),
        ({"transfer": [0, 0]}, r"`transfer` must be .* one per pair of stages \(1\), got 2"),
        ({"input_gradient": 2.0}, "`weight_gradient` must be positive, what is left .* is 0.0"),
        ({"weight_gradient": 3.0}, "`input_gradient` must be positive, what is left .* is -1.0"),
    ],
)
def test_costs_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        simulate(one_f_one_b(2, 2), **options)


def test_an_invalid_schedule_is_not_simulated(parse_rows):
    with pytest.raises(ValueError, match=r"rank 0: B0\.0 is missing"):
        simulate(parse_rows((0,), 1, "F0.0"))


def test_an_unknown_rank_is_named():
    timeline = simulate(one_f_one_b(2, 2))
    for look in (timeline.spans_of, timeline.live_over_time):
        for rank in (-1, 2):
            with pytest.raises(ValueError, match=rf"`rank` must be in \[0, 2\), got {rank}"):
                look(rank)
