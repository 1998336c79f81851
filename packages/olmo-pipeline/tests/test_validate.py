import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_pipeline import (
    dual_pipe_v,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    search,
    simulate,
    v_shape,
    validate,
    zero_bubble,
)


def _plant(schedule, row, actions):
    rows = list(schedule.actions)
    rows[row] = tuple(actions)
    return dataclasses.replace(schedule, actions=tuple(rows))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_every_legal_order_validates(any_split_schedule, data):
    validate(data.draw(any_split_schedule))


@st.composite
def _standard(draw):
    num_ranks, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    build = draw(
        st.sampled_from(
            [
                gpipe,
                v_shape,
                dual_pipe_v,
                lambda p, m: zero_bubble(p, m, "h1"),
                lambda p, m: zero_bubble(p, m, "v"),
                *(lambda p, m, v=v: interleaved_one_f_one_b(p, m, v) for v in (1, 2, 3)),
            ]
        )
    )
    return build(num_ranks, num_microbatches)


@settings(deadline=None, max_examples=30)
@given(_standard(), st.data())
def test_a_missing_or_doubled_action_is_caught(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    row = schedule.actions[rank]
    position = data.draw(st.integers(0, len(row) - 1))
    action = row[position]
    with pytest.raises(ValueError, match=rf"^rank {rank}: {action} is missing\.$"):
        validate(_plant(schedule, rank, row[:position] + row[position + 1 :]))
    with pytest.raises(ValueError, match=rf"^rank {rank}: {action} must stand there once, got it"):
        validate(_plant(schedule, rank, (*row, action)))
    replaced = (*row[:position], row[position - 1], *row[position + 1 :])
    with pytest.raises(ValueError, match=rf"rank {rank}: .* must stand there once"):
        validate(_plant(schedule, rank, replaced))


@settings(deadline=None, max_examples=30)
@given(_standard(), st.data())
def test_an_action_on_another_rank_is_caught(schedule, data):
    stage = data.draw(st.integers(0, schedule.num_stages - 1))
    rank = schedule.rank_of_stage[stage]
    other = data.draw(st.integers(0, schedule.num_ranks - 1))
    action = data.draw(st.sampled_from(schedule.actions[rank]))
    moved = _plant(schedule, rank, [a for a in schedule.actions[rank] if a != action])
    moved = _plant(moved, other, (*moved.actions[other], action))
    if other != rank:
        message = rf"^rank {other}: {action} must stand on rank {rank}, which holds stage"
        with pytest.raises(ValueError, match=message):
            validate(moved)


@settings(deadline=None, max_examples=30)
@given(_standard(), st.data())
def test_a_backward_before_its_forward_is_caught(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    row = list(schedule.actions[rank])
    forward = data.draw(st.sampled_from([a for a in row if a.kind == "forward"]))
    backward = next(
        dataclasses.replace(forward, kind=kind)
        for kind in ("backward", "input_gradient")
        if dataclasses.replace(forward, kind=kind) in row
    )
    i, j = row.index(forward), row.index(backward)
    row[i], row[j] = backward, forward
    with pytest.raises(ValueError, match=rf"^rank {rank}: \S+ stands before \S+, which it needs"):
        validate(_plant(schedule, rank, row))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_a_weight_gradient_before_its_input_gradient_is_caught(num_ranks, count, data):
    schedule = zero_bubble(num_ranks, count, data.draw(st.sampled_from(["h1", "v"])))
    rank = data.draw(st.integers(0, num_ranks - 1))
    row = list(schedule.actions[rank])
    weights = data.draw(st.sampled_from([a for a in row if a.kind == "weight_gradient"]))
    inputs = dataclasses.replace(weights, kind="input_gradient")
    row.remove(weights)
    row.insert(row.index(inputs), weights)
    with pytest.raises(
        ValueError, match=rf"^rank {rank}: {weights} stands before {inputs}, which it needs"
    ):
        validate(_plant(schedule, rank, row))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_the_peak_is_proved(any_split_schedule, data):
    schedule = data.draw(any_split_schedule)
    peaks = simulate(schedule).peak_live_per_rank
    validate(schedule, max_live=peaks)
    validate(schedule, max_live=max(peaks))
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    if peaks[rank] > 0:
        less = [peak - (at == rank) for at, peak in enumerate(peaks)]
        message = (
            rf"^rank {rank}: F\S+ makes {peaks[rank]} live activations, `max_live` is "
            rf"{peaks[rank] - 1}\."
        )
        with pytest.raises(ValueError, match=message):
            validate(schedule, max_live=less)


def _can_run(schedule):
    """Whether all rows can be performed to their end, told another way than `validate` does.

    Each rank tries its next action against a table of counters: how far the chain of each
    microbatch (forwards up, backwards down) has come.
    """
    last = schedule.num_stages - 1
    progress = [0] * schedule.num_microbatches  # steps of the chain F0 .. FS B/I S .. B/I 0
    split_done, queues = set(), [list(row) for row in schedule.actions]
    moved = True
    while moved:
        moved = False
        for queue in queues:
            if not queue:
                continue
            action, index = queue[0], queue[0].microbatch
            if action.kind == "weight_gradient":
                ready = (action.stage, index) in split_done
            else:
                step = action.stage if action.kind == "forward" else 2 * last + 1 - action.stage
                ready = progress[index] == step
                progress[index] += ready
            if ready:
                if action.kind == "input_gradient":
                    split_done.add((action.stage, index))
                queue.pop(0)
                moved = True
    return not any(queues)


@settings(deadline=None, max_examples=120)
@given(st.data())
def test_any_swap_is_legal_or_caught(any_split_schedule, data):
    schedule = data.draw(st.one_of(_standard(), any_split_schedule))
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    row = list(schedule.actions[rank])
    places = st.integers(0, max(0, len(row) - 1))
    i, j = data.draw(places), data.draw(places)
    if row:
        row[i], row[j] = row[j], row[i]
    swapped = _plant(schedule, rank, row)
    if _can_run(swapped):
        validate(swapped)
    else:
        with pytest.raises(ValueError, match=r"rank \d+: |deadlocks: rank \d+ waits at"):
            validate(swapped)


def test_max_live_has_one_number_per_rank():
    with pytest.raises(ValueError, match=r"`max_live` .* one per rank \(2\), got 3"):
        validate(one_f_one_b(2, 2), max_live=[1, 2, 3])


def test_a_backward_is_whole_or_split(parse_rows):
    with pytest.raises(ValueError, match=r"^rank 0: B0.0 is whole, I0.0 must not stand beside it"):
        validate(parse_rows((0,), 1, "F0.0 B0.0 I0.0 W0.0"))
    with pytest.raises(ValueError, match=r"^rank 0: W0.0 is missing\.$"):
        validate(parse_rows((0,), 1, "F0.0 I0.0"))
    with pytest.raises(ValueError, match=r"^rank 0: I0.0 is missing\.$"):
        validate(parse_rows((0,), 1, "F0.0 W0.0"))
    validate(parse_rows((0, 1), 2, "F0.0 F0.1 B0.0 I0.1 W0.1", "F1.0 I1.0 F1.1 B1.1 W1.0"))


def test_chunks_of_one_rank_keep_their_order(parse_rows):
    with pytest.raises(ValueError, match=r"^rank 0: F1.0 stands before F0.0, which it needs\.$"):
        validate(parse_rows((0, 0), 1, "F1.0 F0.0 B1.0 B0.0"))
    with pytest.raises(ValueError, match=r"^rank 0: B0.0 stands before B1.0, which it needs\.$"):
        validate(parse_rows((0, 0), 1, "F0.0 F1.0 B0.0 B1.0"))


def test_unknown_stage_and_microbatch(parse_rows):
    with pytest.raises(ValueError, match=r"^rank 0: F1.0 names stage 1 of 1\.$"):
        validate(parse_rows((0,), 1, "F0.0 B0.0 F1.0"))
    with pytest.raises(ValueError, match=r"^rank 0: F0.1 names microbatch 1 of 1\.$"):
        validate(parse_rows((0,), 1, "F0.0 B0.0 F0.1"))


def test_ranks_that_wait_for_each_other(parse_rows):
    # Each rank's own order is legal; rank 0 wants the gradient of microbatch 0 before it sends 1,
    # rank 1 wants both activations first.
    schedule = parse_rows((0, 1), 2, "F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1")
    message = r"deadlocks: rank 0 waits at B0.0 for B1.0; rank 1 waits at F1.1 for F0.1\.$"
    with pytest.raises(ValueError, match=message):
        validate(schedule)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 9])
def test_1f1b_needs_no_room_for_messages(num_ranks, num_microbatches):
    validate(one_f_one_b(num_ranks, num_microbatches), sends="blocking")


def test_an_order_that_only_eager_sends_can_run(parse_rows):
    # All sends of rank 0 come before rank 1 uses the first, and rank 1 uses them in reverse.
    crossed = parse_rows((0, 1), 2, "F0.0 F0.1 B0.1 B0.0", "F1.1 B1.1 F1.0 B1.0")
    validate(crossed)
    message = r"blocking sends: rank 0 waits to send for F1.0, rank 1 is at F1.1\.$"
    with pytest.raises(ValueError, match=message):
        validate(crossed, sends="blocking")


def test_interleaved_needs_room_for_messages():
    validate(interleaved_one_f_one_b(4, 4, 2), sends="eager")
    with pytest.raises(
        ValueError, match="deadlocks under blocking sends: rank 0 waits to send for"
    ):
        validate(interleaved_one_f_one_b(2, 4, 2), sends="blocking")


BLOCKING = {
    "gpipe": gpipe(4, 8),
    "one_f_one_b": one_f_one_b(4, 8),
    "zero_bubble h1": zero_bubble(4, 8, "h1"),
    "v_shape": v_shape(4, 8),
}
EAGER = {
    "interleaved_one_f_one_b": interleaved_one_f_one_b(4, 8, 2),
    "zero_bubble v": zero_bubble(4, 8, "v"),
    "dual_pipe_v": dual_pipe_v(4, 8),
    "search": search(4, 8, memory_cap=6, tries=10),
}


@pytest.mark.parametrize("name", BLOCKING)
def test_these_need_no_room_for_messages(name):
    validate(BLOCKING[name], sends="blocking")


@pytest.mark.parametrize("name", EAGER)
def test_these_need_room_for_messages(name):
    validate(EAGER[name], sends="eager")
    with pytest.raises(
        ValueError, match=r"deadlocks under blocking sends: rank 0 waits to send for"
    ):
        validate(EAGER[name], sends="blocking")


@pytest.mark.parametrize("build", [gpipe, one_f_one_b, v_shape])
def test_sizes_that_need_no_room_for_messages(build):
    for num_ranks in range(1, 7):
        for count in (1, 2, 3, 5, 12):
            validate(build(num_ranks, count), sends="blocking")


def test_unknown_way_of_sending():
    with pytest.raises(
        ValueError, match=r'`sends` must be "eager" or "blocking", got \'rendezvous'
    ):
        validate(one_f_one_b(1, 1), sends="rendezvous")
