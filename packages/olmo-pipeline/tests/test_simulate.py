import heapq
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_pipeline import Action, interleaved_one_f_one_b, one_f_one_b, simulate


def _events(schedule, forward, backward, transfer):
    """Count by events, another way than `simulate`: a clock, arrivals and a queue of completions.

    Returns makespan and, per rank, the most activations that were alive at once in time.
    """
    last = schedule.num_stages - 1
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
                cost = (forward if action.kind == "forward" else backward)[action.stage]
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
            if action.kind == "backward":
                alive[rank] -= 1
            if action.kind == "forward" and action.stage == last:
                following = Action("backward", last, action.microbatch)
            else:
                stage = action.stage + (1 if action.kind == "forward" else -1)
                following = Action(action.kind, stage, action.microbatch) if stage >= 0 else None
            if following is not None:
                to = schedule.rank_of_stage[following.stage]
                delay = 0.0 if to == rank else transfer
                heapq.heappush(events, (clock + delay, ticket, "arrive", to, following))
                ticket += 1
        if not events or events[0][0] > clock:
            start_what_can()
    assert not any(queues)
    return makespan, tuple(most)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_simulate_equals_a_count_by_events(any_schedule, data):
    schedule = data.draw(
        st.one_of(
            any_schedule,
            st.builds(interleaved_one_f_one_b, *map(st.integers, (1, 1, 1), (4, 6, 3))),
        )
    )
    cost = st.integers(1, 5).map(float)
    stages = st.lists(cost, min_size=schedule.num_stages, max_size=schedule.num_stages)
    forward, backward = data.draw(stages), data.draw(stages)
    transfer = data.draw(st.integers(0, 4)) / 2
    timeline = simulate(schedule, forward=forward, backward=backward, transfer=transfer)
    makespan, most = _events(schedule, forward, backward, transfer)
    assert timeline.makespan == makespan
    assert timeline.peak_live_per_rank == most
    work = (sum(forward) + sum(backward)) * schedule.num_microbatches
    assert timeline.bubble == pytest.approx(1 - work / (schedule.num_ranks * makespan), abs=1e-12)


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
    ],
)
def test_costs_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        simulate(one_f_one_b(2, 2), **options)


def test_an_invalid_schedule_is_not_simulated(parse_rows):
    with pytest.raises(ValueError, match=r"rank 0: B0\.0 is missing"):
        simulate(parse_rows((0,), 1, "F0.0"))
