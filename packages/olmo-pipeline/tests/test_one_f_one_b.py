import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_pipeline import interleaved_one_f_one_b, one_f_one_b, simulate, validate


def _names(schedule, rank):
    return " ".join(map(str, schedule.actions[rank]))


def test_the_order_of_1f1b():
    schedule = one_f_one_b(3, 4)
    assert _names(schedule, 0) == "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3"
    assert _names(schedule, 1) == "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3"
    assert _names(schedule, 2) == "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3"


def test_the_order_of_interleaved_1f1b():
    schedule = interleaved_one_f_one_b(2, 4, 2)
    assert schedule.rank_of_stage == (0, 1, 0, 1)
    assert _names(schedule, 0) == (
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3"
    )
    assert _names(schedule, 1) == (
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3"
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 5, 8, 13])
def test_idle_share_and_peaks_of_1f1b(num_ranks, num_microbatches):
    timeline = simulate(one_f_one_b(num_ranks, num_microbatches))
    fill = num_ranks - 1
    assert timeline.bubble == pytest.approx(fill / (num_microbatches + fill))
    assert timeline.peak_live_per_rank == tuple(
        min(num_ranks - rank, num_microbatches) for rank in range(num_ranks)
    )


def test_published_idle_share_and_peaks_of_two_chunks():
    timeline = simulate(interleaved_one_f_one_b(4, 8, 2), forward=1.0, backward=1.0)
    assert timeline.bubble == pytest.approx(3 / 19)
    assert round(100 * timeline.bubble, 1) == 15.8
    assert timeline.peak_live_per_rank == (11, 9, 7, 5)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_chunks", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_idle_share_of_whole_rounds(num_ranks, num_chunks, rounds, backward):
    num_microbatches = rounds * num_ranks
    schedule = interleaved_one_f_one_b(num_ranks, num_microbatches, num_chunks)
    fill = num_ranks - 1
    assert simulate(schedule, backward=backward).bubble == pytest.approx(
        fill / (num_chunks * num_microbatches + fill)
    )


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(1, 14), st.integers(1, 4))
def test_any_number_of_microbatches_validates(num_ranks, num_microbatches, num_chunks):
    schedule = interleaved_one_f_one_b(num_ranks, num_microbatches, num_chunks)
    validate(schedule)
    assert schedule.num_microbatches == num_microbatches
    assert schedule.num_stages == num_ranks * num_chunks
    # An incomplete round never takes longer than a whole one.
    whole = interleaved_one_f_one_b(
        num_ranks, -(-num_microbatches // num_ranks) * num_ranks, num_chunks
    )
    assert simulate(schedule).makespan <= simulate(whole).makespan


def test_an_incomplete_last_round():
    # Warm-up counts for whole rounds on a round of one microbatch would leave rank 3 waiting for
    # a backward of stage 8 whose forward stands behind it.
    schedule = interleaved_one_f_one_b(4, 5, 3)
    validate(schedule)
    assert len(schedule.actions[0]) == 2 * 3 * 5


def test_one_chunk_is_1f1b():
    assert interleaved_one_f_one_b(3, 5, 1) == one_f_one_b(3, 5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 2), "`num_ranks` must be at least 1, got 0"),
        ((1, 0, 2), "`num_microbatches` must be at least 1, got 0"),
        ((1, 1, 0), "`num_chunks` must be at least 1, got 0"),
    ],
)
def test_sizes_below_one(sizes, message):
    with pytest.raises(ValueError, match=message):
        interleaved_one_f_one_b(*sizes)
    if sizes[2]:
        with pytest.raises(ValueError, match=message):
            one_f_one_b(*sizes[:2])
