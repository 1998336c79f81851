"""No token is lost or predicted twice, and no held-out document is trained on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_trainer.data import (
    ByteTokenizer,
    Document,
    PackedDataset,
    split_documents,
    token_stream,
)
from olmo_trainer.data.seeded import seeded_hash, seeded_permutation

END = ByteTokenizer.end_of_document
SEEDS = st.integers(0, 2**32)
DOCUMENTS = st.dictionaries(
    st.text(min_size=1, max_size=5), st.text("abc\n\u00e9", min_size=1), min_size=2, max_size=12
).map(lambda texts: [Document(id, text) for id, text in texts.items()])


def test_draws_never_change():
    # A checkpoint of last year relies on these.
    assert seeded_hash("train order", 7, 0) == 118937576055256971546372547559693719001
    assert seeded_permutation(8, "train order", 7, 0).tolist() == [6, 5, 1, 4, 2, 7, 0, 3]


def test_draws_depend_on_every_argument():
    draws = {
        seeded_hash(purpose, seed, name)
        for purpose in ("a", "b")
        for seed in (-1, 1, 11)
        for name in ("1", "11", "\udcff", "\ud800")
    }
    assert len(draws) == 24


@settings(max_examples=40, deadline=None)
@given(DOCUMENTS, SEEDS, st.floats(0.01, 0.5), st.randoms())
def test_split_puts_each_document_on_one_side(documents, seed, fraction, random):
    train, heldout = split_documents(documents, seed=seed, heldout_fraction=fraction)
    assert sorted(d.id for d in train + heldout) == sorted(d.id for d in documents)
    assert fraction * len(documents) <= len(heldout) < fraction * len(documents) + 1
    shuffled = random.sample(documents, len(documents))
    assert split_documents(shuffled, seed=seed, heldout_fraction=fraction) == (train, heldout)


def test_split_depends_on_the_seed_and_is_fair():
    documents = [Document(f"{i}.txt", "x") for i in range(20)]
    counts = np.zeros(20)
    for seed in range(200):
        for document in split_documents(documents, seed=seed, heldout_fraction=0.25)[1]:
            counts[int(document.id.removesuffix(".txt"))] += 1
    assert counts.sum() == 200 * 5
    # Binomial(200, 1/4): mean 50, deviation 6.1; five deviations either side.
    assert counts.min() > 19
    assert counts.max() < 81


def test_impossible_splits_are_refused():
    two = [Document("a", "x"), Document("b", "y")]
    for fraction in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="`heldout_fraction` must be between 0 and 1, got"):
            split_documents(two, seed=0, heldout_fraction=fraction)
    with pytest.raises(ValueError, match=r"got 1 in all with .*give more files .*cut\)\.$"):
        split_documents(two[:1], seed=0)
    with pytest.raises(ValueError, match=r"got 2 in all with `heldout_fraction`=0\.9"):
        split_documents(two, seed=0, heldout_fraction=0.9)
    with pytest.raises(ValueError, match="document ids must differ"):
        split_documents([*two, two[0]], seed=0)


@settings(max_examples=40, deadline=None)
@given(DOCUMENTS, SEEDS)
def test_stream_is_each_document_between_ends(documents, seed):
    stream = token_stream(documents, ByteTokenizer(), seed=seed)
    assert stream.dtype == np.uint16
    ids = stream.tolist()
    assert ids[0] == END
    assert ids[-1] == END
    pieces, piece = [], []
    for id in ids[1:]:
        if id == END:
            pieces.append(bytes(piece).decode())
            piece = []
        else:
            piece.append(id)
    assert sorted(pieces) == sorted(document.text for document in documents)


def test_stream_order_depends_on_the_seed_only():
    documents = [Document(str(i), chr(97 + i)) for i in range(8)]
    tokenizer = ByteTokenizer()
    streams = {bytes(token_stream(documents, tokenizer, seed=seed)) for seed in range(10)}
    assert len(streams) == 10
    again = token_stream(documents[::-1], tokenizer, seed=3)
    np.testing.assert_array_equal(again, token_stream(documents, tokenizer, seed=3))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 40), st.integers(1, 45))
def test_windows_predict_each_token_once_from_the_one_before(num_tokens, sequence_length):
    stream = np.arange(1000, 1000 + num_tokens, dtype=np.uint16)  # each token is its own name
    dataset = PackedDataset(stream, sequence_length, pad_id=7)
    inputs, targets, mask = dataset.windows(np.arange(len(dataset)))
    assert inputs.shape == targets.shape == mask.shape == (len(dataset), sequence_length)
    assert targets[mask].tolist() == list(range(1001, 1000 + num_tokens))
    np.testing.assert_array_equal(inputs[mask], targets[mask] - 1)
    assert set(inputs[~mask].tolist()) | set(targets[~mask].tolist()) <= {7}
    assert mask[:-1].all()  # only the last one is short
    assert mask[-1, 0]
    assert mask.sum() == dataset.num_targets == num_tokens - 1
    for index in range(len(dataset)):
        sequence = dataset.sequence(index).tolist()
        start = 1000 + index * sequence_length
        assert sequence == list(range(start, min(start + sequence_length + 1, 1000 + num_tokens)))


def test_windows_come_as_asked_and_minus_one_is_padding():
    dataset = PackedDataset(np.arange(10, 17, dtype=np.uint16), 4, pad_id=END)
    inputs, targets, mask = dataset.windows(np.array([1, -1, 0]))
    assert inputs.tolist() == [[14, 15, END, END], [END] * 4, [10, 11, 12, 13]]
    assert targets.tolist() == [[15, 16, END, END], [END] * 4, [11, 12, 13, 14]]
    assert mask.sum(axis=1).tolist() == [2, 0, 4]
    assert [array.shape for array in dataset.windows(np.array([], dtype=np.int64))] == [(0, 4)] * 3


def test_bad_datasets_and_indices_are_refused():
    tokens = np.arange(9, dtype=np.uint16)
    with pytest.raises(ValueError, match="`sequence_length` must be at least 1, got 0"):
        PackedDataset(tokens, 0, END)
    with pytest.raises(ValueError, match=r"one row of at least 2, .* got shape \(1,\)"):
        PackedDataset(tokens[:1], 4, END)
    with pytest.raises(ValueError, match=r"one row of at least 2, .* got shape \(3, 3\)"):
        PackedDataset(tokens.reshape(3, 3), 4, END)
    with pytest.raises(TypeError, match="`tokens` must be integers, got float64"):
        PackedDataset(tokens.astype(np.float64), 4, END)  # pyright: ignore[reportArgumentType]
    dataset = PackedDataset(tokens, 4, END)
    for index in (-1, 2):
        with pytest.raises(IndexError, match=rf"must be in \[0, 2\), got {index}"):
            dataset.sequence(index)
    for index in (-2, 2):
        with pytest.raises(IndexError, match=rf"must be in \[-1, 2\), got {index}"):
            dataset.windows(np.array([0, index]))
