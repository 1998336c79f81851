"""Each sequence once an epoch, whatever the batch size and wherever a run stops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_trainer.data import Share, TrainOrder

SIZES = st.integers(1, 17)


def sole(num_sequences: int, batch_sequences: int, seed: int) -> TrainOrder:
    """Return the order of one source."""
    return TrainOrder([Share(num_sequences)], batch_sequences, seed)


@settings(max_examples=40, deadline=None)
@given(SIZES, SIZES, st.integers(0, 2**64))
def test_each_sequence_comes_once_an_epoch(num_sequences, batch_sequences, seed):
    order = sole(num_sequences, batch_sequences, seed)
    epochs = 4
    num_steps = -(-epochs * num_sequences // batch_sequences)
    batches = [order.sequences(step) for step in range(num_steps)]
    assert {batch.shape for batch in batches} == {(batch_sequences,)}
    visited = np.concatenate(batches)[: epochs * num_sequences].reshape(epochs, num_sequences)
    for epoch in visited:
        assert sorted(epoch.tolist()) == list(range(num_sequences))


@settings(max_examples=20, deadline=None)
@given(SIZES, SIZES, st.integers(0, 99), st.permutations(range(12)))
def test_a_step_is_the_same_in_whatever_order_steps_are_asked_for(n, b, seed, steps):
    straight = [sole(n, b, seed).sequences(step).tolist() for step in range(12)]
    order = sole(n, b, seed)
    assert {step: order.sequences(step).tolist() for step in steps} == dict(enumerate(straight))


def test_batch_size_cuts_the_same_list():
    wide, narrow = sole(11, 6, 5), sole(11, 2, 5)
    for step in range(8):
        parts = [narrow.sequences(3 * step + part) for part in range(3)]
        np.testing.assert_array_equal(wide.sequences(step), np.concatenate(parts))


def test_epochs_and_seeds_have_their_own_permutations():
    epochs = {tuple(sole(31, 31, seed).sequences(e)) for seed in range(5) for e in range(5)}
    assert len(epochs) == 25


def test_first_place_is_fair():
    first = [int(sole(5, 5, seed).sequences(seed % 3)[0]) for seed in range(1000)]
    counts = np.bincount(first, minlength=5)
    assert abs(counts - 200).max() < 64  # five deviations of Binomial(1000, 1/5)


def test_a_caller_cannot_change_the_order():
    order = sole(6, 3, 0)
    before = order.sequences(0).copy()
    order.sequences(0)[:] = 0
    np.testing.assert_array_equal(order.sequences(0), before)


def test_far_steps_do_not_overflow():
    assert len(sole(7, 5, 0).sequences(2**70)) == 5


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="`num_sequences` must be at least 1, got 0"):
        sole(0, 1, 0)
    with pytest.raises(ValueError, match="`batch_sequences` must be at least 1, got -2"):
        sole(1, -2, 0)
    with pytest.raises(ValueError, match="`step` must be at least 0, got -1"):
        sole(1, 1, 0).sequences(-1)
