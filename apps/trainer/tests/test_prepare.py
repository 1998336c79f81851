"""Text to token files: the same bytes by any number of processes and after any stop."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_trainer.cli import main
from olmo_trainer.data import TokenFiles, TrainData
from olmo_trainer.prepare import PrepareOptions, prepare
from olmo_trainer.prepare import run as run_module
from olmo_trainer.prepare.writer import STATE, State
from olmo_trainer.text import MANIFEST, JsonTokenizer, TokenManifest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

APP = Path(__file__).parents[1]
TEXTS = [f"text number {i}: caf\u00e9 \U0001f600 " + "word " * (i % 5) for i in range(30)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE as the open models use it."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS, trainer)
    bpe.enable_truncation(4)
    bpe.enable_padding(length=64)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    bpe.save(str(path))
    return path


def json_lines(texts) -> bytes:
    return b"".join(json.dumps({"id": 1, "text": text}).encode() + b"\n" for text in texts)


def write_inputs(folder: Path, texts=TEXTS) -> Path:
    """Write the texts in every form, some in each."""
    folder.mkdir(parents=True, exist_ok=True)
    part = -(-len(texts) // 6)
    first, second, third, fourth, fifth, sixth = (
        texts[start : start + part] for start in range(0, 6 * part, part)
    )
    (folder / "a.jsonl").write_bytes(json_lines(first))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(second)))
    halves = [zstandard.compress(json_lines(each)) for each in (third[:2], third[2:])]
    (folder / "c.json.zst").write_bytes(b"".join(halves))  # two frames, as parallel writers do
    table = pyarrow.table({"id": range(len(fourth)), "text": fourth})
    pyarrow.parquet.write_table(table, folder / "d.parquet", row_group_size=2)
    for index, text in enumerate(fifth):
        (folder / "e").mkdir(exist_ok=True)
        (folder / "e" / f"{index}.txt").write_text(text)
    (folder / "f.ndjson").write_bytes(json_lines(sixth) + b"\n")
    return folder


def ids_of(folder: Path) -> np.ndarray:
    corpus = TokenFiles([folder], vocab_size=2**20).open()
    return np.concatenate([file.tokens for file in corpus.files])


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_every_form_gives_its_texts_in_order(tmp_path):
    manifest = prepare([write_inputs(tmp_path / "in")], tmp_path / "out", PrepareOptions())
    expected = [id for text in TEXTS for id in [*text.encode(), 256]]
    assert ids_of(tmp_path / "out").tolist() == expected
    assert manifest.documents == 30
    assert manifest.tokens == len(expected)
    assert manifest.dtype == "uint16"
    assert manifest == TokenManifest.read(tmp_path / "out" / MANIFEST)
    assert sorted(bytes_of(tmp_path / "out")) == [MANIFEST, "tokens-00000.bin"]


def test_a_tokenizer_file_gives_its_ids_and_the_usual_end(tmp_path, tokenizer):
    options = PrepareOptions(tokenizer)
    manifest = prepare([write_inputs(tmp_path / "in")], tmp_path / "out", options)
    opened = JsonTokenizer(tokenizer)
    assert manifest.vocabulary.size == 300
    assert manifest.vocabulary.end_of_document == opened.end_of_document == 0
    ids = ids_of(tmp_path / "out")
    pieces = np.split(ids, np.flatnonzero(ids == 0) + 1)[:-1]
    assert [opened.decode(piece) for piece in pieces] == TEXTS
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    again = JsonTokenizer(tmp_path / "out" / "tokenizer.json")
    assert again.name == manifest.vocabulary.name
    named = prepare(
        [tmp_path / "in"], tmp_path / "other", PrepareOptions(tokenizer, end_of_document="<|pad|>")
    )
    assert named.vocabulary.end_of_document == 1


def test_text_cannot_end_its_own_document(tmp_path, tokenizer):
    text = "how to write <|endoftext|> and <|pad|> in a page"
    opened = JsonTokenizer(tokenizer)
    ids = opened.encode(text)
    assert not {0, 1} & set(ids.tolist())
    assert opened.decode(ids) == text
    (tmp_path / "a.txt").write_text(text)
    prepare([tmp_path / "a.txt"], tmp_path / "out", PrepareOptions(tokenizer))
    assert ids_of(tmp_path / "out").tolist() == [*ids.tolist(), 0]


@settings(max_examples=40, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_a_byte_level_tokenizer_gives_any_text_back(tokenizer, text):
    opened = JsonTokenizer(tokenizer)
    assert opened.decode(opened.encode(text)) == text


def test_the_bytes_do_not_depend_on_processes(tmp_path, tokenizer, monkeypatch):
    write_inputs(tmp_path / "in", [f"{text} {i}" for i in range(4) for text in TEXTS])
    options = PrepareOptions(tokenizer, file_tokens=200)
    folders = []
    for num_workers, chunk in ((2, 2), (1, 2), (1, 50)):
        monkeypatch.setattr(run_module, "_CHUNK_TEXTS", chunk)
        folders.append(tmp_path / f"{num_workers} {chunk}")
        prepare([tmp_path / "in"], folders[-1], options, num_workers=num_workers)
    by_two, by_one, in_large_chunks = map(bytes_of, folders)
    assert len(by_two) > 5
    assert by_two == by_one == in_large_chunks


@pytest.mark.parametrize("stop_after", [1, 2, 5])
def test_a_stopped_preparation_goes_on_to_the_same_bytes(tmp_path, stop_after, monkeypatch):
    texts = [text if i % 7 else "" for i in range(3) for text in TEXTS]
    source = write_inputs(tmp_path / "in", texts)
    options = PrepareOptions(file_tokens=300)
    prepare([source], tmp_path / "whole", options)
    monkeypatch.setattr(run_module, "_CHUNK_TEXTS", 3)
    ended = []

    def stop(name: str) -> None:
        ended.append(name)
        if len(ended) == stop_after:
            raise KeyboardInterrupt

    folder = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        prepare([source], folder, options, on_file=stop)
    (folder / "tokens.bin.partial").write_bytes(b"half of a file")
    with pytest.raises(ValueError, match=r"begun with options = .* got .*; go on with the same"):
        prepare([source], folder, PrepareOptions(file_tokens=301))
    rest: list[str] = []
    prepare([source], folder, options, on_file=rest.append)
    assert not set(rest) & set(ended)
    assert bytes_of(folder) == bytes_of(tmp_path / "whole")


def test_a_killed_preparation_goes_on_to_the_same_bytes(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(json_lines([f"{i} " + "some words " * 40 for i in range(20_000)]))
    command = [sys.executable, str(APP), "prepare", str(source), "--file-tokens", "300000"]
    command += ["--to"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = subprocess.Popen([*command, str(killed), "--workers", "2"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (killed / "tokens-00001.bin").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / MANIFEST).exists()
    for folder in (killed, whole):
        assert main([*command[2:], str(folder), "--workers", "1"]) == 0
    assert bytes_of(killed) == bytes_of(whole)


def test_nothing_is_overwritten(tmp_path):
    source = write_inputs(tmp_path / "in")
    prepare([source], tmp_path / "out", PrepareOptions())
    before = bytes_of(tmp_path / "out")
    with pytest.raises(ValueError, match="finished token files, which are never overwritten"):
        prepare([source], tmp_path / "out", PrepareOptions())
    assert bytes_of(tmp_path / "out") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="must be empty or new, found other files in it"):
        prepare([source], tmp_path / "mine", PrepareOptions())
    with pytest.raises(ValueError, match=r"thesis.txt` must be a folder, found a file"):
        prepare([source], tmp_path / "mine" / "thesis.txt", PrepareOptions())
    with pytest.raises(ValueError, match="is being written by another process"):
        prepare(
            [source],
            tmp_path / "new",
            PrepareOptions(file_tokens=1),
            on_file=lambda name: prepare([source], tmp_path / "new", PrepareOptions(file_tokens=1)),
        )


def test_a_lost_file_of_a_stopped_preparation_is_an_error(tmp_path):
    source = write_inputs(tmp_path / "in")
    options = PrepareOptions(file_tokens=100)

    def stop(name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([source], tmp_path / "out", options, on_file=stop)
    (tmp_path / "out" / "tokens-00000.bin").unlink()
    with pytest.raises(ValueError, match=r"tokens-00000.bin` must have .* bytes, got 0; give"):
        prepare([source], tmp_path / "out", options)
    (tmp_path / "out" / "unfinished.json").write_text("{")
    with pytest.raises(ValueError, match="must be the state of a preparation, got JSONDecodeError"):
        prepare([source], tmp_path / "out", options)


def test_what_holds_no_text_is_counted(tmp_path):
    lines = [{"text": "a"}, {"text": ""}, {"text": None}, {"text": "\ud800"}, {"text": "b"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    (tmp_path / "c.txt").write_bytes(b"")
    manifest = prepare([tmp_path], tmp_path / "out", PrepareOptions())
    assert manifest.documents == 2
    assert manifest.skipped == {"empty": 2, "no text": 1, "not UTF-8": 2}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text"',
            r"line 2: each line must be a JSON object, got: Exp",
        ),
        ("a.jsonl", b"[1]\n", r"a.jsonl`, line 1: each line must be a JSON object, got list"),
        ("a.jsonl", b'{"body": "x", "id": 1}', r"line 1: .* the field 'text', got body, id; name"),
        ("a.jsonl", b'{"text": 3}', r"line 1: the text must be a string, got int"),
        ("a.jsonl", b'\xff{"text": 3}', r"line 1: each line must be a JSON object, got: "),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}' * 99)[:-9], r"whole gzip file, got EOFError"),
        ("a.jsonl.gz", b"plain", r"must be a whole gzip file, got BadGzipFile"),
        ("a.jsonl.zst", zstandard.compress(b'{"text": "x"}\n' * 99)[:-3], r"ends within a frame"),
        ("a.jsonl.zst", b"plain text", r"must be a whole zstd file, got EOFError: .*zstd"),
        ("a.parquet", b"PAR1 is not enough", r"must be a whole Parquet file, got ArrowInvalid"),
    ],
)
def test_a_malformed_input_is_named_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare([tmp_path / name], tmp_path / "out", PrepareOptions())
    assert not (tmp_path / "out").exists()


def test_inputs_without_any_text_leave_no_trace(tmp_path, tokenizer, capsys):
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    (tmp_path / "there").mkdir()
    for out in (tmp_path / "new" / "deeper", tmp_path / "there"):
        words = ["prepare", str(tmp_path / "b.txt"), "--to", str(out), "--workers", "1"]
        assert main([*words, "--tokenizer", str(tokenizer)]) == 2
        said = capsys.readouterr().err
        assert "must hold at least one text, found none (left out: 1 not UTF-8)" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.txt", "there"]
    assert not list((tmp_path / "there").iterdir())


def test_whole_files_before_a_malformed_line_stay_and_are_gone_on_from(tmp_path):
    lines = json_lines(TEXTS)
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(lines + b"broken!")
    options = PrepareOptions(file_tokens=200)
    with pytest.raises(ValueError, match="each line must be a JSON object"):
        prepare([source], out, options)
    # Nothing of the malformed input's own chunk is whole: it is as if it had never begun.
    assert not out.exists()
    source.write_bytes(lines * 60 + b"broken!")
    with pytest.raises(ValueError, match="each line must be a JSON object"):
        prepare([source], out, options)
    assert (out / STATE).is_file()
    kept = len(list(out.glob("tokens-*.bin")))
    assert kept > 1
    source.write_bytes(lines * 60 + b"\n     \n")  # as many bytes
    names: list[str] = []
    prepare([source], out, options, on_file=names.append)
    assert names[0] == f"tokens-{kept:05}.bin"


def test_a_column_of_another_name_or_kind(tmp_path):
    table = pyarrow.table({"body": ["x", None], "text": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"row 0: the text must be a string, got int"):
        prepare([tmp_path / "a.parquet"], tmp_path / "o", PrepareOptions())
    with pytest.raises(ValueError, match=r"must have the column 'words', got body, text; name"):
        prepare([tmp_path / "a.parquet"], tmp_path / "p", PrepareOptions(field="words"))
    manifest = prepare([tmp_path / "a.parquet"], tmp_path / "q", PrepareOptions(field="body"))
    assert (manifest.documents, manifest.skipped) == (1, {"no text": 1})


def test_wrong_arguments_write_nothing(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for inputs, options, arguments, message in [
        ([tmp_path / "no"], {}, {}, r"no` must be a file or a folder of text, found nothing"),
        ([tmp_path / "empty"], {}, {}, r"empty` must hold files named \*.txt or .*, found none"),
        ([tmp_path], {}, {"patterns": ["*.rst"]}, r"must hold files named \*.rst, found none"),
        ([tmp_path / "a.txt"] * 2, {}, {}, r"given once, got `.*a.txt` twice"),
        ([tmp_path], {}, {"num_workers": 0}, "`num_workers` must be at least 1, got 0"),
        ([tmp_path], {"file_tokens": 0}, {}, "`file_tokens` must be at least 1, got 0"),
        ([tmp_path], {"tokenizer": tmp_path / "bad.json"}, {}, "must be a tokenizer as the `tok"),
        ([tmp_path], {"tokenizer": tmp_path / "gone.json"}, {}, "got FileNotFoundError"),
        ([tmp_path], {"tokenizer": tokenizer, "end_of_document": "<s>"}, {}, "a token of .*'<s>'"),
        ([tmp_path], {"end_of_document": "</s>"}, {}, "left out without a tokenizer file, got"),
    ]:
        with pytest.raises(ValueError, match=message):
            prepare(inputs, tmp_path / "out", PrepareOptions(**options), **arguments)
    assert not (tmp_path / "out").exists()


def test_an_unclear_end_of_document_must_be_named(tmp_path):
    def save(*special: str) -> Path:
        small = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
        small.add_special_tokens(list(special))
        small.save(str(tmp_path / "t.json"))
        return tmp_path / "t.json"

    with pytest.raises(
        ValueError, match=r"must hold one of .* to end a document, found none; name"
    ):
        JsonTokenizer(save())
    with pytest.raises(ValueError, match=r"found <\|endoftext\|> and </s>; name the token to use"):
        JsonTokenizer(save("</s>", "<|endoftext|>"))
    opened = JsonTokenizer(save("</s>", "<|endoftext|>"), "</s>")
    assert (opened.end_of_document, opened.vocab_size) == (2, 4)
    with pytest.raises(ValueError, match=r"`ids` must be in \[0, 4\), got 4 to 4"):
        opened.decode([4])


@pytest.mark.parametrize(
    ("package", "name"), [("pyarrow", "d.parquet"), ("zstandard", "c.json.zst")]
)
def test_a_missing_extra_is_named(tmp_path, monkeypatch, package, name):
    source = write_inputs(tmp_path / "in")
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"{name}` needs the package `{package}`; .*olmo-trainer --extra prepare"
    with pytest.raises(ValueError, match=message):
        prepare([source / name], tmp_path / "out", PrepareOptions())


def test_other_inputs_are_told_by_what_differs(tmp_path):
    sizes = {f"{index:04}.txt": index for index in range(5000)}
    State({"inputs": sizes}).write(tmp_path)
    State.read(tmp_path, {"inputs": dict(sizes)})
    with pytest.raises(ValueError, match=r"inputs = \{0007.txt: 7\}, got \{0007.txt: 9\};"):
        State.read(tmp_path, {"inputs": {**sizes, "0007.txt": 9}})
    with pytest.raises(ValueError, match=r"\{no x, .*: 0, .*: 1, 4998 more\}") as refused:
        State.read(tmp_path, {"inputs": {"x": 1}})
    assert len(str(refused.value)) < 400


def test_a_missing_tokenizers_is_named(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"package `tokenizers`, .*trainer --extra prepare"):
        JsonTokenizer(tokenizer)


def test_the_command_prepares_and_says_how_to_train(tmp_path, tokenizer, capsys):
    source = write_inputs(tmp_path / "in")
    out = tmp_path / "out"
    command = ["prepare", str(source), "--to", str(out), "--tokenizer", str(tokenizer)]
    assert main([*command, "--workers", "1", "--file-tokens", "200"]) == 0
    printed = capsys.readouterr().out
    assert f"{out / 'tokens-00000.bin'}\n" in printed
    assert "of 30 documents in" in printed
    assert f"--set data.source.paths={out} --set model.vocab_size=300" in printed
    assert "\x1b" not in printed
    assert main(command) == 2
    assert "never overwritten" in capsys.readouterr().err
    data = TrainData.load(
        TokenFiles([out], vocab_size=300), sequence_length=16, batch_sequences=4, seed=0
    )
    assert data.num_documents == 30


def test_preparing_does_not_import_torch(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    code = (
        "import sys; from olmo_trainer.cli import main\n"
        f"assert main(['prepare', {str(tmp_path / 'a.txt')!r}, '--to', {str(tmp_path / 'o')!r}, "
        "'--workers', '1']) == 0\n"
        "assert 'torch' not in sys.modules; assert 'pydantic' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_interrupt_ends_with_a_word(tmp_path, monkeypatch, capsys):
    def interrupt(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("olmo_trainer.prepare.command.prepare", interrupt)
    assert main(["prepare", os.fspath(tmp_path), "--to", os.fspath(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "stopped; the same command goes on\n"
