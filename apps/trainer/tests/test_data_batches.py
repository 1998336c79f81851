"""Every layout sees the same tokens in the same steps, and a resume goes on where it stopped."""

import pickle
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_trainer.data import (
    IGNORE_INDEX,
    Batch,
    ByteTokenizer,
    Corpus,
    Document,
    PackedDataset,
    StandardLibrary,
    TextFolder,
    TrainData,
)

END = ByteTokenizer.end_of_document
LAYOUTS = [(r, a) for r in (1, 2, 3, 4, 6, 12) for a in (1, 2, 3, 4, 6, 12) if 12 % (r * a) == 0]


@dataclass(frozen=True)
class Texts:
    """A source in memory; every text is unlike the others."""

    texts: dict[str, str] = field(
        default_factory=lambda: {f"{i}.txt": f"<{i}>" * (1 + i % 7) for i in range(40)}
    )

    def read(self) -> Corpus:
        return Corpus(tuple(Document(*item) for item in sorted(self.texts.items())), {})


def load(source=None, **changes) -> TrainData:
    arguments = {"sequence_length": 9, "batch_sequences": 12, "seed": 3, "heldout_fraction": 0.3}
    return TrainData.load(source or Texts(), **(arguments | changes))


def rows(*batches: Batch) -> list[tuple[list[int], list[int], list[bool]]]:
    """Return the sequences of batches one after the other."""
    return [
        (tokens.tolist(), targets.tolist(), mask.tolist())
        for batch in batches
        for tokens, targets, mask in zip(
            batch.tokens_BS, batch.targets_BS, batch.mask_BS, strict=True
        )
    ]


def predicted(sequences) -> list[tuple[int, int]]:
    """Return the real (token, next token) pairs of sequences, in order."""
    return [
        (token, target)
        for tokens, targets, mask in sequences
        for token, target, real in zip(tokens, targets, mask, strict=True)
        if real
    ]


def test_a_batch_is_its_sequences_shifted_by_one():
    dataset = PackedDataset(torch.arange(50, 56).numpy(), 4, pad_id=END)
    batch = Batch.gather(dataset, torch.tensor([1, 0, -1]).numpy())
    assert batch.tokens_BS.tolist() == [[54, END, END, END], [50, 51, 52, 53], [END] * 4]
    assert batch.targets_BS.tolist() == [[55, -100, -100, -100], [51, 52, 53, 54], [-100] * 4]
    assert (batch.targets_BS != IGNORE_INDEX).equal(batch.mask_BS)
    assert batch.tokens_BS.dtype == batch.targets_BS.dtype == torch.int64
    assert batch.mask_BS.dtype == torch.bool
    assert batch.num_targets == 5
    assert rows(batch.to("cpu")) == rows(batch)
    assert {t.device.type for t in vars_of(batch.to("meta"))} == {"meta"}


def vars_of(batch: Batch) -> list[torch.Tensor]:
    return [batch.tokens_BS, batch.targets_BS, batch.mask_BS]


def test_an_epoch_and_the_held_out_side_hold_every_byte_of_the_source_once():
    source = Texts()
    data = load(source)
    assert data.num_documents == 40
    num_steps = -(-len(data.train) // 12)
    train = rows(*(data.global_batch(step) for step in range(num_steps)))[: len(data.train)]
    heldout = rows(*data.heldout_batches(5, num_replicas=1, replica=0))
    for sequences, dataset in ((train, data.train), (heldout, data.heldout)):
        (stream,) = (part.tokens.tolist() for part in dataset.parts)
        pairs = Counter(pairwise(stream))
        assert Counter(predicted(sequences)) == pairs
    targets = [target for _, target in predicted(train + heldout)]
    expected = "".join(source.texts.values()).encode()
    assert Counter(targets) == Counter(expected) + Counter({END: 40})


def test_both_sides_hold_their_own_documents():
    data = load()
    decode = ByteTokenizer().decode
    sides = [
        set(decode(side.parts[0].tokens, separator="|").strip("|").split("|"))
        for side in (data.train, data.heldout)
    ]
    assert [len(side) for side in sides] == [28, 12]
    assert sides[0] | sides[1] == set(Texts().texts.values())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 30), st.sampled_from(LAYOUTS), st.integers(0, 5), st.integers(1, 12))
def test_microbatches_of_every_layout_make_the_global_batch(step, layout, seed, length):
    num_replicas, accumulation = layout
    data = load(seed=seed, sequence_length=length)
    parts = []
    for replica in range(num_replicas):
        share = data.microbatches(
            step, num_replicas=num_replicas, replica=replica, accumulation=accumulation
        )
        assert len(share) == accumulation
        assert {len(batch.tokens_BS) for batch in share} == {12 // (num_replicas * accumulation)}
        parts += share
    assert rows(*parts) == rows(data.global_batch(step))


def run(steps: range, num_replicas: int, accumulation: int, *, warm: bool = False) -> list:
    """Return the sequences of some steps, in a process that has just started."""
    data = load()
    if warm:  # a dry run and a validation leave no trace
        data.global_batch(0)
        list(data.heldout_batches(4, num_replicas=1, replica=0))
    return [
        rows(
            *(
                batch
                for replica in range(num_replicas)
                for batch in data.microbatches(
                    step, num_replicas=num_replicas, replica=replica, accumulation=accumulation
                )
            )
        )
        for step in steps
    ]


def test_stop_and_resume_twice_with_other_layouts_is_the_uninterrupted_run():
    data = load()
    assert len(data.train) < 12 * 12 / 3  # the run crosses the ends of epochs
    straight = run(range(12), 2, 1)
    same = run(range(4), 2, 1) + run(range(4, 8), 2, 1) + run(range(8, 12), 2, 1)
    other = run(range(4), 2, 3) + run(range(4, 8), 1, 1, warm=True) + run(range(8, 12), 4, 1)
    assert straight == same == other


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), st.integers(1, 5), st.none() | st.integers(1, 60), st.integers(1, 12))
def test_held_out_sequences_come_once_over_all_replicas(batch_sequences, replicas, limit, length):
    data = load(sequence_length=length)
    shares = [
        list(
            data.heldout_batches(
                batch_sequences, num_replicas=replicas, replica=replica, limit_sequences=limit
            )
        )
        for replica in range(replicas)
    ]
    assert len({len(share) for share in shares}) == 1
    shapes = {batch.tokens_BS.shape for share in shares for batch in share}
    assert shapes == {(batch_sequences, length)}
    # Batch by batch over the replicas, the sequences come in their own order, padding last.
    sequences = rows(*(batch for column in zip(*shares, strict=True) for batch in column))
    expected = min(limit or len(data.heldout), len(data.heldout))
    assert [any(mask) for _, _, mask in sequences[:expected]] == [True] * expected
    for tokens, targets, mask in sequences[expected:]:
        assert set(tokens) == {END}
        assert set(targets) == {IGNORE_INDEX}
        assert not any(mask)
    assert len(sequences) - expected < batch_sequences * replicas
    stream = data.heldout.parts[0].tokens[: expected * length + 1].tolist()
    assert predicted(sequences) == list(pairwise(stream))


def test_fingerprint_is_the_same_for_the_same_data():
    data = load()
    assert len(data.fingerprint) == 32
    assert load().fingerprint == data.fingerprint
    assert pickle.loads(pickle.dumps(data)).fingerprint == data.fingerprint
    reverse = dict(reversed(Texts().texts.items()))
    assert load(Texts(reverse)).fingerprint == data.fingerprint


def test_fingerprint_changes_with_anything_that_moves_a_token():
    class Renamed(ByteTokenizer):
        name = "other bytes"

    texts = Texts().texts
    data = [
        load(),
        load(seed=4),
        load(sequence_length=10),
        load(batch_sequences=24),
        load(heldout_fraction=0.35),
        load(tokenizer=Renamed()),
        *(load(Texts(texts | {name: text[:-1] + "!"})) for name, text in texts.items()),
        load(Texts(texts | {"new.txt": "x"})),
        load(Texts({name: text for name, text in texts.items() if name != "7.txt"})),
        load(Texts(texts | {"0.txt": texts["1.txt"], "1.txt": texts["0.txt"]})),
        # The same text in all, cut between documents elsewhere.
        load(
            Texts(
                texts | {"0.txt": texts["0.txt"] + texts["1.txt"][0], "1.txt": texts["1.txt"][1:]}
            )
        ),
    ]
    fingerprints = {each.fingerprint for each in data}
    assert len(fingerprints) == len(data)


def test_fingerprint_tells_the_two_sides_apart():
    data = load()
    (part,) = data.parts
    swapped = TrainData([replace(part, train=part.heldout, heldout=part.train)], data.order)
    assert swapped.fingerprint != data.fingerprint


def test_impossible_layouts_are_refused_before_any_work():
    data = load()
    with pytest.raises(ValueError, match=r"`batch_sequences`=12 must be a multiple of .* 2 \* 4;"):
        data.microbatches(0, num_replicas=2, replica=0, accumulation=4)
    with pytest.raises(ValueError, match="`accumulation` must be at least 1, got 0"):
        data.microbatches(0, num_replicas=1, replica=0, accumulation=0)
    for num_replicas, replica in ((2, 2), (2, -1), (0, 0)):
        message = rf"`replica` must be in \[0, `num_replicas`={num_replicas}\), got {replica}"
        with pytest.raises(ValueError, match=message):
            data.microbatches(0, num_replicas=num_replicas, replica=replica, accumulation=1)
        with pytest.raises(ValueError, match=message):
            data.heldout_batches(1, num_replicas=num_replicas, replica=replica)
    with pytest.raises(ValueError, match="`batch_sequences` must be at least 1, got 0"):
        data.heldout_batches(0, num_replicas=1, replica=0)
    with pytest.raises(ValueError, match="`limit_sequences` must be at least 1, got 0; leave it"):
        data.heldout_batches(1, num_replicas=1, replica=0, limit_sequences=0)


def test_bad_sizes_and_sources_reach_the_caller_by_name(tmp_path: Path):
    with pytest.raises(ValueError, match="`sequence_length` must be at least 1, got 0"):
        load(sequence_length=0)
    with pytest.raises(ValueError, match="`batch_sequences` must be at least 1, got 0"):
        load(batch_sequences=0)
    with pytest.raises(ValueError, match=r"`heldout_fraction` must be between 0 and 1, got 1\.5"):
        load(heldout_fraction=1.5)
    with pytest.raises(ValueError, match=r"nowhere` must be a folder, found nothing"):
        load(TextFolder(tmp_path / "nowhere"))


def test_a_batch_larger_than_the_data_repeats_it():
    data = load(Texts({"a": "first", "b": "other"}), heldout_fraction=0.5, sequence_length=4)
    assert len(data.train) == 2
    assert Counter(map(str, rows(data.global_batch(5)))) == Counter(
        {str(row): 6 for row in rows(Batch.gather(data.train, torch.arange(2).numpy()))}
    )


def test_what_a_source_skipped_is_kept(tmp_path: Path):
    for name, content in {"a.txt": b"a", "b.txt": b"b", "c.txt": b"\xff"}.items():
        (tmp_path / name).write_bytes(content)
    assert load(TextFolder(tmp_path)).skipped == {"c.txt": "not UTF-8"}


def test_standard_library_makes_a_run():
    data = load(StandardLibrary(), sequence_length=256, heldout_fraction=0.05)
    assert 0.01 < data.heldout.num_targets / data.train.num_targets < 0.25
    batch = data.global_batch(0)
    assert batch.tokens_BS.shape == (12, 256)
    text = ByteTokenizer().decode(batch.tokens_BS.flatten(), separator="\n")
    assert "def " in text
    assert "self" in text
