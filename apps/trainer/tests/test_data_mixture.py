"""Several sources: weights kept everywhere, limits kept, one order under every layout."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_trainer.data import Corpus, Document, Ingredient, Share, TokenFiles, TrainData, TrainOrder
from olmo_trainer.data.order import BLOCK, apportion
from olmo_trainer.data.seeded import feistel_permutation, permuted_range

WEIGHTS = st.lists(st.floats(0.01, 10), min_size=2, max_size=5)


def order(sizes, weights, batch=7, seed=0, limits=None) -> TrainOrder:
    limits = limits or [None] * len(sizes)
    shares = [
        Share(size, f"source {index}", weight, limit)
        for index, (size, weight, limit) in enumerate(zip(sizes, weights, limits, strict=True))
    ]
    return TrainOrder(shares, batch, seed)


def sources_of(each: TrainOrder, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source and the sequence in it of each position."""
    drawn = np.concatenate([each.sequences(step) for step in range(num_steps)])
    sizes = [share.num_sequences for share in each.shares]
    ends = np.cumsum(sizes)
    source = np.searchsorted(ends, drawn, side="right")
    return source, drawn - (ends - sizes)[source]


@settings(max_examples=30, deadline=None)
@given(WEIGHTS, st.integers(0, 2**64), st.integers(1, 50))
def test_every_run_of_positions_keeps_the_weights(weights, seed, batch):
    each = order([11] * len(weights), weights, batch, seed)
    source, _ = sources_of(each, 1 + 2000 // batch)
    parts = np.array(weights) / sum(weights)
    random = np.random.default_rng(0)
    for _ in range(50):
        start, stop = np.sort(random.integers(0, len(source), 2))
        counts = np.bincount(source[start:stop], minlength=len(weights))
        allowed = 2 + 2 * len(weights) * parts + (stop - start) * 2 / BLOCK + 1e-9
        assert (abs(counts - (stop - start) * parts) <= allowed).all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(0, 99))
def test_each_source_is_read_pass_by_pass(sizes, seed):
    each = order(sizes, [1.0 + index for index in range(len(sizes))], 6, seed)
    source, sequence = sources_of(each, 40)
    draws = each.draws(240)
    for index, size in enumerate(sizes):
        own = sequence[source == index]
        assert len(own) == draws[index]
        for start in range(0, len(own) - size + 1, size):
            assert sorted(own[start : start + size].tolist()) == list(range(size))
        assert each.passes(40)[f"source {index}"] == draws[index] / size


def test_draws_are_counted_right_across_blocks():
    each = order([5, 9], [0.3, 0.7], batch=BLOCK // 2 + 1)
    source, _ = sources_of(each, 5)
    total = 0
    for step in range(6):
        counted = np.bincount(source[: step * each.batch_sequences], minlength=2)
        assert each.draws(step * each.batch_sequences) == tuple(counted.tolist())
        total = step * each.batch_sequences
    assert total > 2 * BLOCK
    assert sum(each.draws(10**15 + 3)) == 10**15 + 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=40), st.integers(40, 10_000))
def test_places_are_divided_whole(weights, places):
    quotas = apportion(weights, places)
    assert sum(quotas) == places
    assert min(quotas) >= 1
    for (weight, quota), (other, its) in zip(
        zip(weights, quotas, strict=True),
        reversed(list(zip(weights, quotas, strict=True))),
        strict=True,
    ):
        assert weight < other or quota >= its - 1


def test_plain_weights_are_exact():
    assert apportion([1, 1], 65536) == (32768, 32768)
    assert apportion([3, 1], 65536) == (49152, 16384)
    assert apportion([1, 1, 1], 4) == (2, 1, 1)
    assert apportion([1e9, 1], 8) == (7, 1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(1, 9),
    st.lists(st.none() | st.floats(0.1, 3), min_size=4, max_size=4),
)
def test_the_run_ends_with_the_last_whole_batch_within_every_limit(sizes, batch, limits):
    limits = limits[: len(sizes)]
    each = order(sizes, [1.0] * len(sizes), batch, limits=limits)
    most = each.max_steps
    if all(limit is None for limit in limits):
        assert most is None
        return

    def within(num_steps: int) -> bool:
        counts = Counter(sources_of(each, num_steps)[0].tolist()) if num_steps else Counter()
        return all(
            limit is None or counts[index] <= limit * size
            for index, (size, limit) in enumerate(zip(sizes, limits, strict=True))
        )

    assert within(most)
    assert not within(most + 1)


def test_one_pass_gives_no_sequence_twice():
    each = order([20, 10], [2, 1], 4, limits=[1, 1])
    assert each.max_steps == 7  # 30 sequences hold 7 whole batches; 2 sequences are left
    source, sequence = sources_of(each, 7)
    assert len(set(zip(source.tolist(), sequence.tolist(), strict=True))) == 28


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**128 - 1))
def test_a_feistel_network_permutes(size, key):
    found = feistel_permutation(np.arange(size), size, key)
    assert sorted(found.tolist()) == list(range(size))


def test_feistel_permutations_are_fair_and_differ():
    first = [int(feistel_permutation(np.arange(1), 5, key * 2**64 + 1)[0]) for key in range(1000)]
    counts = np.bincount(first, minlength=5)
    assert abs(counts - 200).max() < 64  # five deviations of Binomial(1000, 1/5)
    size = 2**20
    permuted = feistel_permutation(np.arange(size), size, 7)
    distances = abs(permuted - np.arange(size))
    assert abs(distances.mean() / size - 1 / 3) < 0.01
    assert (feistel_permutation(np.arange(size), size, 8) != permuted).mean() > 0.99


def test_large_sources_need_no_permutation_in_memory():
    size = 10**12
    order_ = TrainOrder([Share(size)], 1024, 0)
    drawn = np.concatenate([order_.sequences(step) for step in (0, 1, 10**8, 10**9 + 7)])
    assert len(set(drawn.tolist())) == len(drawn)
    assert 0 <= drawn.min() < drawn.max() < size
    small, large = 2**20, 2**20 + 1
    for each in (small, large):
        found = permuted_range(5, 9, each, "p", 0, 0)
        np.testing.assert_array_equal(found, permuted_range(0, 9, each, "p", 0, 0)[5:])


class Texts:
    def __init__(self, letter: str, count: int = 20):
        self.letter, self.count = letter, count

    def read(self) -> Corpus:
        texts = [Document(f"{i:02}", self.letter * (3 + i)) for i in range(self.count)]
        return Corpus(tuple(texts), {})


def mix(weights=(3, 1), limits=(None, None), names=("a", "b"), **changes) -> TrainData:
    arguments = {"sequence_length": 5, "batch_sequences": 12, "seed": 1, "heldout_fraction": 0.3}
    ingredients = {
        name: Ingredient(Texts(name), weight, limit)
        for name, weight, limit in zip(names, weights, limits, strict=True)
    }
    return TrainData.mix(ingredients, **(arguments | changes))


def letters(*batches) -> Counter:
    ids = np.concatenate([batch.tokens_BS.numpy().ravel() for batch in batches])
    return Counter(chr(id) for id in ids.tolist() if id < 256)


def test_a_mixture_holds_its_weights_and_its_own_held_out_parts():
    data = mix()
    found = letters(*(data.global_batch(step) for step in range(40)))
    assert 2.7 < found["a"] / found["b"] < 3.3
    for name in ("a", "b"):
        batches = list(data.heldout_batches(4, num_replicas=1, replica=0, source=name))
        assert set(letters(*batches)) == {name}
    both = letters(*data.heldout_batches(4, num_replicas=1, replica=0, limit_sequences=8))
    assert both["a"] > 0
    assert both["b"] > 0
    with pytest.raises(ValueError, match="`source` must be one of 'a', 'b', got 'c'"):
        data.heldout_batches(4, num_replicas=1, replica=0, source="c")


@pytest.mark.parametrize(("num_replicas", "accumulation"), [(1, 1), (2, 3), (4, 1), (1, 12)])
def test_a_mixture_is_the_same_under_every_layout_and_after_a_resume(num_replicas, accumulation):
    expected = mix()
    for step in (0, 5, 17):
        fresh = mix()
        parts = [
            batch.tokens_BS
            for replica in range(num_replicas)
            for batch in fresh.microbatches(
                step, num_replicas=num_replicas, replica=replica, accumulation=accumulation
            )
        ]
        np.testing.assert_array_equal(
            np.concatenate(parts), expected.global_batch(step).tokens_BS.numpy()
        )


def test_the_fingerprint_knows_the_mixture_but_not_where_it_ends():
    prints = [
        mix().fingerprint,
        mix(weights=(2, 1)).fingerprint,
        mix(names=("a", "c")).fingerprint,
        mix(names=("b", "a"), weights=(1, 3)).fingerprint,
        mix(separate_documents=True).fingerprint,
    ]
    assert len(set(prints)) == len(prints)
    assert mix(limits=(2, None)).fingerprint == mix(weights=(6, 2)).fingerprint == prints[0]


def test_a_mixture_says_its_passes():
    data = mix()
    passes = data.order.passes(40)
    assert data.describe(40) == (
        f"40 documents, {len(data.train)} sequences of 5 (passes in 40 steps: "
        f"a {passes['a']:.2f}, b {passes['b']:.2f})"
    )


def test_bad_mixtures_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`weight` must be above 0, got 0; leave the source out"):
        Share(3, weight=0)
    with pytest.raises(ValueError, match="`max_passes` must be above 0, got 0"):
        Share(3, max_passes=0)
    with pytest.raises(ValueError, match="there must be 1 to 65536 sources, got 0"):
        TrainOrder([], 1, 0)
    with pytest.raises(ValueError, match="must have different names"):
        TrainOrder([Share(3), Share(4)], 1, 0)
    np.tile([1, 7], 30).astype("<u2").tofile(tmp_path / "x.bin")
    foreign = TokenFiles([tmp_path / "x.bin"], 257, dtype="uint16", end_of_document=7)
    with pytest.raises(
        ValueError, match=r"must share one vocabulary, got Vocabulary\(name='', .*b"
    ):
        TrainData.mix(
            {"a": Ingredient(Texts("a")), "b": Ingredient(foreign)},
            sequence_length=5,
            batch_sequences=2,
            seed=0,
        )
