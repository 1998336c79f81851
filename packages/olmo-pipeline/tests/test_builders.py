import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_pipeline import dual_pipe_v, gpipe, simulate, v_shape, validate, zero_bubble

BUILDERS = {
    "gpipe": gpipe,
    "v_shape": v_shape,
    "h1": lambda ranks, count: zero_bubble(ranks, count, "h1"),
    "v": lambda ranks, count: zero_bubble(ranks, count, "v"),
    "dual_pipe_v": dual_pipe_v,
}


def _names(schedule, rank):
    return " ".join(map(str, schedule.actions[rank]))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(list(BUILDERS)), st.integers(1, 7), st.integers(1, 17))
def test_any_size_validates_and_keeps_no_more_than_it_claims(name, num_ranks, num_microbatches):
    schedule = BUILDERS[name](num_ranks, num_microbatches)
    claimed = {
        "gpipe": num_microbatches,
        "v_shape": num_ranks + 2,
        "h1": num_ranks,
        "v": 2 * num_ranks,
        "dual_pipe_v": 2 * num_ranks + 1,
    }[name]
    validate(schedule, max_live=claimed)
    assert (schedule.num_ranks, schedule.num_microbatches) == (num_ranks, num_microbatches)
    if name in ("gpipe", "h1"):
        assert schedule.rank_of_stage == tuple(range(num_ranks))
        validate(schedule, sends="blocking")
    else:
        there = tuple(range(num_ranks))
        assert schedule.rank_of_stage == there + there[::-1]
    assert schedule.splits_backward == (name in ("h1", "v")) or name == "dual_pipe_v"


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(list(BUILDERS)), st.integers(1, 5), st.integers(1, 11))
def test_microbatches_keep_their_order(name, num_ranks, num_microbatches):
    schedule = BUILDERS[name](num_ranks, num_microbatches)
    last = {}
    for row in schedule.actions:
        for action in row:
            key = (action.kind, action.stage)
            assert action.microbatch > last.get(key, -1)
            last[key] = action.microbatch


def test_the_order_of_gpipe():
    assert _names(gpipe(2, 3), 1) == "F1.0 F1.1 F1.2 B1.0 B1.1 B1.2"


def test_the_order_of_v_shape():
    assert _names(v_shape(2, 3), 0) == (
        "F0.0 F0.1 F3.0 B3.0 F3.1 F0.2 B3.1 B0.0 F3.2 B3.2 B0.1 B0.2"
    )


def test_the_order_of_dual_pipe_v():
    assert _names(dual_pipe_v(2, 4), 0) == (
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 F0.3 B3.1 F3.2 B0.0 B3.2 F3.3 B0.1 B3.3 I0.2 W0.2 "
        "I0.3 W0.3"
    )
    assert _names(dual_pipe_v(2, 4), 1) == (
        "F1.0 F2.0 F1.1 F2.1 F1.2 B2.0 F2.2 B1.0 F1.3 B2.1 F2.3 B1.1 B2.2 B1.2 I2.3 I1.3 W2.3 W1.3"
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 8, 16])
def test_idle_share_of_gpipe(num_ranks, num_microbatches):
    timeline = simulate(gpipe(num_ranks, num_microbatches))
    fill = num_ranks - 1
    assert timeline.bubble == pytest.approx(fill / (num_microbatches + fill))
    assert timeline.peak_live_per_rank == (num_microbatches,) * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 7, 8, 9, 16])
@pytest.mark.parametrize("num_microbatches", [2, 3, 4, 5, 6, 7, 16, 28])
def test_idle_time_of_v_shape(num_ranks, num_microbatches):
    timeline = simulate(v_shape(num_ranks, num_microbatches), forward=1.0, backward=1.0)
    odd = num_ranks % 2 == 1 and 2 * num_microbatches > num_ranks + 1
    assert timeline.makespan == 4 * num_microbatches + 4 * num_ranks - 6 + odd


def test_published_bubble_and_peaks_of_v_shape():
    timeline = simulate(v_shape(4, 8), forward=1.0, backward=1.0)
    assert round(100 * timeline.bubble, 1) == 23.8
    assert timeline.peak_live_per_rank == (6, 6, 6, 6)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 9])
@pytest.mark.parametrize("costs", [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75)])
def test_published_idle_time_of_h1(num_ranks, extra, costs):
    forward, inputs, weights = costs
    timeline = simulate(
        zero_bubble(num_ranks, num_ranks + extra, "h1"),
        forward=forward,
        input_gradient=inputs,
        weight_gradient=weights,
    )
    idle = timeline.makespan - (num_ranks + extra) * sum(costs)
    assert idle == pytest.approx((num_ranks - 1) * (forward + inputs - weights))
    assert timeline.peak_live_per_rank == (num_ranks,) * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8, 13, 16])
@pytest.mark.parametrize("extra", [0, 1, 7])
def test_zero_bubble_v_idles_for_the_stagger_alone(num_ranks, extra):
    num_microbatches = 2 * num_ranks + extra
    timeline = simulate(zero_bubble(num_ranks, num_microbatches, "v"))
    assert timeline.makespan == 6 * num_microbatches + num_ranks - 1


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7, 16])
@pytest.mark.parametrize("extra", [0, 1, 7])
@pytest.mark.parametrize("costs", [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (2.0, 2.5, 1.0)])
def test_dual_pipe_v_idles_no_longer_than_published(num_ranks, extra, costs):
    forward, inputs, weights = costs
    num_microbatches = 2 * num_ranks + extra
    timeline = simulate(
        dual_pipe_v(num_ranks, num_microbatches),
        forward=forward,
        backward=inputs + weights,
        input_gradient=inputs,
        weight_gradient=weights,
    )
    whole = inputs + weights
    idle = timeline.makespan - 2 * num_microbatches * (forward + whole)
    assert idle <= (num_ranks - 1) * (forward + whole + whole - 3 * weights) + 1e-9
    assert idle >= (num_ranks - 1) * forward - 1e-9
    if num_ranks > 1:
        assert timeline.peak_live_per_rank == (2 * num_ranks + 1,) * num_ranks


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_sizes_are_checked(build):
    with pytest.raises(ValueError, match="`num_ranks` must be at least 1, got 0"):
        build(0, 1)
    with pytest.raises(ValueError, match="`num_microbatches` must be at least 1, got 0"):
        build(1, 0)


def test_unknown_kind_of_zero_bubble():
    with pytest.raises(ValueError, match='`kind` must be "h1" or "v", got \'h2\''):
        zero_bubble(2, 2, "h2")
