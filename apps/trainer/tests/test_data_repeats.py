"""A sequence that repeats itself becomes padding; nothing else moves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_trainer.data import Corpus, Document, RepeatFilter, TrainData


def repeats_in(tokens: list[int], max_period: int, max_count: int) -> bool:
    """Whether a pattern of at most `max_period` stands `max_count` times in a row, by trial."""
    return any(
        tokens[start : start + period] * max_count == tokens[start : start + period * max_count]
        for period in range(1, max_period + 1)
        for start in range(len(tokens) - period * max_count + 1)
    )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=14, max_size=14),
    st.integers(1, 20),
    st.integers(2, 6),
    st.integers(0, 14),
)
def test_it_finds_what_a_trial_finds(tokens, max_period, max_count, real):
    mask = np.arange(14) < real
    found = RepeatFilter(max_period, max_count).repetitive(np.array([tokens]), mask[None])
    assert found.tolist() == [repeats_in(tokens[:real], max_period, max_count)]


def test_the_defaults_are_those_of_olmo_core():
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 50_000, (4, 13 * 32 + 5))
    rows[1, 3 : 3 + 13 * 32] = np.tile(np.arange(13), 32)  # 32 times: too many
    rows[2, 3 : 3 + 13 * 31] = np.tile(np.arange(13), 31)  # 31 times: not yet
    rows[3, : 14 * 30] = np.tile(np.arange(14), 30)  # of period 14: not looked for
    mask = np.ones(rows.shape, np.bool_)
    assert RepeatFilter().repetitive(rows, mask).tolist() == [False, True, False, False]


class Texts:
    def read(self) -> Corpus:
        plain = "the quick brown fox jumps over the lazy dog, and then some more of it."
        texts = [Document(f"{i:02}", "ab" * 40 if i % 4 == 0 else plain) for i in range(24)]
        return Corpus(tuple(texts), {})


def test_a_filtered_sequence_is_padding_in_its_place():
    arguments = {"sequence_length": 16, "batch_sequences": 8, "seed": 0}
    plain = TrainData.load(Texts(), **arguments)
    data = TrainData.load(Texts(), **arguments, repeats=RepeatFilter(2, 4), separate_documents=True)
    filtered = 0
    for step in range(len(plain.train) // 8):
        whole, left = plain.global_batch(step), data.global_batch(step)
        bad = RepeatFilter(2, 4).repetitive(whole.tokens_BS.numpy(), whole.mask_BS.numpy())
        filtered += bad.sum()
        for tokens, rest in ((whole.tokens_BS, left.tokens_BS), (whole.mask_BS, left.mask_BS)):
            np.testing.assert_array_equal(tokens[~bad], rest[~bad])
        assert not left.mask_BS[bad].any()
        assert (left.targets_BS[bad] == -100).all()
        assert (left.tokens_BS[bad] == 256).all()
    assert filtered > 5
    assert data.fingerprint != plain.fingerprint
    heldout = list(data.heldout_batches(8, num_replicas=1, replica=0))
    assert sum(batch.num_targets for batch in heldout) == data.heldout.num_targets


def test_bad_filters_are_refused():
    with pytest.raises(ValueError, match="`max_period` must be at least 1, got 0"):
        RepeatFilter(0, 32)
    with pytest.raises(ValueError, match="`max_count` must be at least 2, got 1"):
        RepeatFilter(13, 1)
