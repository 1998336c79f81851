"""Token files: every id of them is trained on once, and what is wrong is said before training."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_trainer.data import TextFolder, TokenFiles, TrainData
from olmo_trainer.data.heldout_tail import heldout_border
from olmo_trainer.text import MANIFEST, TokenManifest, Vocabulary, WrittenFile

END = 9


def documents(count: int, *, seed: int = 0, longest: int = 12) -> np.ndarray:
    """Return `count` documents of ids 0..8, each with the end 9 after it."""
    random = np.random.default_rng(seed)
    pieces = [
        [*random.integers(0, 9, random.integers(1, longest)).tolist(), END] for _ in range(count)
    ]
    return np.array([id for piece in pieces for id in piece])


def write(path: Path, ids: np.ndarray, dtype: str = "uint16", *, header: bool = False) -> Path:
    ids = ids.astype(np.dtype(dtype).newbyteorder("<"))
    if header:
        np.save(path, ids)
    else:
        ids.tofile(path)
    return path


def files(*paths: Path, **changes) -> TokenFiles:
    arguments = {"vocab_size": 10, "dtype": "uint16", "end_of_document": END}
    return TokenFiles(paths, **(arguments | changes))


def load(source, **changes) -> TrainData:
    arguments = {"sequence_length": 7, "batch_sequences": 4, "seed": 1, "heldout_fraction": 0.2}
    return TrainData.load(source, **(arguments | changes))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize("check", ["all", "sampled"])
def test_ids_are_mapped_as_they_were_written(tmp_path, dtype, header, check):
    ids = documents(50)
    path = write(tmp_path / "a.npy", ids, dtype, header=header)
    source = files(path, dtype=None if header else dtype, check=check)
    (file,) = source.open().files
    assert file.tokens.dtype == dtype
    assert file.tokens.tolist() == ids.tolist()
    with pytest.raises(ValueError, match="read-only"):
        file.tokens[0] = 1


def test_folders_and_patterns_are_read_in_the_order_of_names(tmp_path):
    for name in ("b.npy", "a.bin", "c.bin", "notes.txt"):
        write(tmp_path / name, documents(3))
    names = [file.path.name for file in files(tmp_path).open().files]
    assert names == ["a.bin", "b.npy", "c.bin"]
    names = [file.path.name for file in files(tmp_path / "b*", tmp_path / "*.bin").open().files]
    assert names == ["b.npy", "a.bin", "c.bin"]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(3, 20), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(0, 3),
    st.sampled_from([0.05, 0.3, 0.49]),
)
def test_every_token_but_a_files_first_is_predicted_once_on_one_side(
    tmp_path_factory, sizes, length, seed, fraction
):
    folder = tmp_path_factory.mktemp("tokens")
    streams = [documents(size, seed=seed + 7 * size) for size in sizes]
    for index, stream in enumerate(streams):
        write(folder / f"{index}.bin", stream)
    # The last document of a file that holds more than half of it cannot be held out.
    borders = [heldout_border(stream, END, fraction) for stream in streams]
    if all(border is None for border in borders):
        with pytest.raises(ValueError, match="found none to hold out"):
            load(files(folder), sequence_length=length, heldout_fraction=fraction)
        return
    data = load(files(folder), sequence_length=length, heldout_fraction=fraction)
    num_steps = -(-len(data.train) // 4)
    batches = [data.global_batch(step) for step in range(num_steps)]
    rows = [
        row
        for batch in batches
        for row in zip(batch.tokens_BS, batch.targets_BS, batch.mask_BS, strict=True)
    ][: len(data.train)]
    heldout = [
        row
        for batch in data.heldout_batches(3, num_replicas=1, replica=0)
        for row in zip(batch.tokens_BS, batch.targets_BS, batch.mask_BS, strict=True)
    ]
    predicted = [
        (int(token), int(target))
        for tokens, targets, mask in rows + heldout
        for token, target, real in zip(tokens, targets, mask, strict=True)
        if real
    ]
    assert Counter(predicted) == Counter(pair for each in streams for pair in pairwise(each))
    assert sum(side.num_targets for side in data.heldout.parts) == sum(
        len(stream) - border
        for stream, border in zip(streams, borders, strict=True)
        if border is not None
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=30), st.floats(0.01, 0.99))
def test_the_border_is_the_end_nearest_to_the_place_asked_for(ends, fraction):
    tokens = np.where(ends, END, 1)
    size = len(tokens)
    borders = [b for b in range(max(1, (size + 1) // 2), size) if tokens[b - 1] == END]
    asked = min(max(round((1 - fraction) * size), 1, (size + 1) // 2), size - 1)
    expected = min(borders, key=lambda b: (abs(b - asked), b), default=None)
    assert heldout_border(tokens, END, fraction) == expected


def test_a_border_is_found_across_blocks(monkeypatch):
    monkeypatch.setattr("olmo_trainer.data.heldout_tail._BLOCK", 4)
    tokens = np.ones(100, int)
    for border in range(50, 100):
        tokens[:] = 1
        tokens[border - 1] = END
        for fraction in (0.01, 0.25, 0.5):
            assert heldout_border(tokens, END, fraction) == border


def test_documents_are_numbered_from_the_end_before_them(tmp_path):
    ids = np.array([1, 2, END, 3, END, END, 4, 5] + [1, END] * 8)
    data = load(files(write(tmp_path / "a.bin", ids)), sequence_length=8, separate_documents=True)
    batch = data.heldout_batches(1, num_replicas=1, replica=0)
    first = next(b for b in batch_list(data) if b.tokens_BS[0, :3].tolist() == [1, 2, END])
    assert first.documents_BS is not None
    assert first.documents_BS[0].tolist() == [0, 0, 1, 1, 2, 3, 3, 3]
    assert next(batch).documents_BS is not None
    assert load(files(tmp_path / "a.bin")).global_batch(0).documents_BS is None
    assert first.to("meta").documents_BS.device.type == "meta"


def batch_list(data: TrainData):
    sequences = range(len(data.train))
    return [data._gather(np.array([index])) for index in sequences]


def described(folder: Path, ids: np.ndarray, **changes) -> Path:
    folder.mkdir()
    write(folder / "x.bin", ids)
    number = int((ids == END).sum())
    fields = {"name": "x.bin", "tokens": len(ids), "documents": number, "largest_id": 9}
    file = WrittenFile(**(fields | {"hash": "h"} | changes))
    TokenManifest(Vocabulary("some", 10, END), "uint16", (file,), {}, {}, {}).write(
        folder / MANIFEST
    )
    return folder


def test_a_manifest_says_it_all(tmp_path):
    ids = documents(30)
    folder = described(tmp_path / "a", ids)
    corpus = TokenFiles([folder], vocab_size=64).open()
    assert corpus.vocabulary == Vocabulary("some", 10, END)
    assert corpus.num_documents == 30
    assert corpus.files[0].digest == "h"
    assert load(TokenFiles([folder], vocab_size=64)).num_documents == 30


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 3}, "must have 6 bytes, as the manifest says, got"),
        ({"name": "gone.bin"}, "as the manifest says, got 0; copy it again"),
        ({"largest_id": 10}, r"ids must be in \[0, 10\), the vocabulary, got 10"),
    ],
)
def test_a_folder_unlike_its_manifest_is_refused(tmp_path, changes, message):
    folder = described(tmp_path / "a", documents(30), **changes)
    with pytest.raises(ValueError, match=message):
        TokenFiles([folder], vocab_size=64).open()


def test_a_manifest_and_the_configuration_must_agree(tmp_path):
    folder = described(tmp_path / "a", documents(30))
    with pytest.raises(ValueError, match=r"a vocabulary of 10 ids, .* set model.vocab_size=10"):
        TokenFiles([folder], vocab_size=9).open()
    with pytest.raises(ValueError, match=r"`dtype` must be what the manifest .* \(uint16\), got"):
        TokenFiles([folder], 64, dtype="uint32").open()
    with pytest.raises(ValueError, match=r"`end_of_document` must be .* \(9\), got 3; leave it"):
        TokenFiles([folder], 64, end_of_document=3).open()
    (folder / MANIFEST).write_text("{}")
    with pytest.raises(ValueError, match=r"must be a manifest of token files .*KeyError: 'format'"):
        TokenFiles([folder], 64).open()


def test_files_without_a_manifest_need_and_must_match_what_is_given(tmp_path):
    ids = documents(30)
    raw = write(tmp_path / "raw.bin", ids)
    headed = write(tmp_path / "headed.npy", ids, header=True)
    with pytest.raises(ValueError, match="`dtype` must be given, 'uint16' or 'uint32'"):
        files(raw, dtype=None).open()
    with pytest.raises(ValueError, match="`end_of_document` must be given, the id that ends"):
        files(raw, end_of_document=None).open()
    with pytest.raises(ValueError, match=r"says \(uint16\), got uint32; leave it out"):
        files(headed, dtype="uint32").open()
    with pytest.raises(ValueError, match=r"must be in \[0, 10\), the vocabulary, got 10"):
        files(raw, end_of_document=10).open()
    with pytest.raises(ValueError, match=r"nowhere` must be a token file or a folder .* nothing"):
        files(tmp_path / "nowhere").open()
    with pytest.raises(ValueError, match=r"the pattern `.*\*\.x` must match token files"):
        files(tmp_path / "*.x").open()
    with pytest.raises(ValueError, match="`paths` must name at least one token file"):
        files()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty` must hold .npy or .bin files or a manifest.json"):
        files(tmp_path / "empty").open()


@pytest.mark.parametrize("check", ["all", "sampled"])
def test_an_id_past_the_vocabulary_is_named_with_its_place(tmp_path, check):
    ids = documents(30)
    ids[17] = 500
    path = write(tmp_path / "a.bin", ids)
    with pytest.raises(ValueError, match=r"a\.bin`: ids must be in .* got 500 at position 17;"):
        files(path, check=check).open()


def test_a_sampled_check_looks_at_blocks_from_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("olmo_trainer.text.token_files._BLOCK", 4)
    ids = np.tile([1, 2, 3, END], 100)
    for place in (0, 399):
        bad = ids.copy()
        bad[place] = 99
        with pytest.raises(ValueError, match=f"got 99 at position {place};"):
            files(write(tmp_path / "a.bin", bad), check="sampled").open()
    bad = ids.copy()
    bad[4 * 3] = 99  # in a block that 16 of 100 leave out
    write(tmp_path / "a.bin", bad)
    assert len(files(tmp_path / "a.bin", check="sampled").open().files) == 1
    with pytest.raises(ValueError, match="got 99 at position 12"):
        files(tmp_path / "a.bin").open()


def test_wrong_sizes_shapes_and_dtypes_are_refused(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"123")
    with pytest.raises(ValueError, match="must hold whole uint16 ids, 2 bytes each, got 3 bytes"):
        files(path).open()
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="must hold whole uint16 ids, 2 bytes each, got 0 bytes"):
        files(path).open()
    # 32-bit ids taken for 16-bit ones: every second is 0, and the end is not what it was.
    write(path, documents(30) + 70_000, "uint32")
    with pytest.raises(ValueError, match=r"must be in \[0, 10\), the model's vocabulary, got 44"):
        files(path).open()
    write(path, np.ones(20))
    with pytest.raises(
        ValueError, match=r"must hold an end of document \(id 9\), found none in 20"
    ):
        files(path).open()
    for bad in (np.ones((2, 3), np.uint16), np.ones(6, np.int64), np.zeros(0, np.uint16)):
        np.save(tmp_path / "b.npy", bad)
        with pytest.raises(ValueError, match=rf"one row of uint16 or uint32, got {bad.dtype} of"):
            files(tmp_path / "b.npy", dtype=None).open()
    content = (tmp_path / "b.npy").read_bytes()
    (tmp_path / "b.npy").write_bytes(content[:20])
    with pytest.raises(ValueError, match=r"must be a whole `.npy` file, got ValueError"):
        files(tmp_path / "b.npy", dtype=None).open()


def test_pickles_are_not_loaded(tmp_path):
    np.save(tmp_path / "a.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"must be a whole `.npy` file, got ValueError"):
        files(tmp_path / "a.npy", dtype=None).open()


def test_the_fingerprint_follows_content_not_place(tmp_path):
    first = write(tmp_path / "a.bin", documents(30))
    second = write(tmp_path / "b.bin", documents(30, seed=1))
    (tmp_path / "moved").mkdir()
    moved = write(tmp_path / "moved" / "c.bin", documents(30))
    changed = documents(30)
    changed[40] = (changed[40] + 1) % 9
    fingerprints = [
        load(source).fingerprint
        for source in (
            files(first),
            files(second),
            files(first, second),
            files(second, first),
            files(write(tmp_path / "d.bin", changed)),
        )
    ]
    assert load(files(moved)).fingerprint == fingerprints[0]
    assert len(set(fingerprints)) == len(fingerprints)


def test_text_and_token_files_give_the_same_kind_of_sequences(tmp_path):
    for index in range(12):
        (tmp_path / f"{index}.txt").write_text(f"text {index}")
    text = load(TextFolder(tmp_path))
    ids = text.train.parts[0].tokens[1:]
    write(tmp_path / "t.bin", np.concatenate([ids, ids]))
    tokens = load(files(tmp_path / "t.bin", vocab_size=257, end_of_document=256))
    assert tokens.vocabulary.end_of_document == text.vocabulary.end_of_document == 256
    assert tokens.train.pad_id == text.train.pad_id
