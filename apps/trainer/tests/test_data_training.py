"""Runs on token files and mixtures: from `prepare` to a sample, to the end of the data, and on."""

import io
import json
from pathlib import Path

import pytest
from olmo_trainer import loop
from olmo_trainer.checkpoint_manifest import CheckpointError, find_checkpoint, read_manifest
from olmo_trainer.metrics import StepRecord, read_metrics
from olmo_trainer.open_data import end_with_data, open_data, open_tokenizer
from olmo_trainer.prepare import PrepareOptions, prepare
from olmo_trainer.verify import make_scenario, split_batch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def folders(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The small documents as token files: bytes, and a small tokenizer's ids."""
    home = tmp_path_factory.mktemp("tokens")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train([str(path) for path in text_folder.iterdir()], trainer)
    bpe.save(str(home / "tokenizer.json"))
    for name, tokenizer in (("bytes", None), ("words", home / "tokenizer.json")):
        prepare([text_folder], home / name, PrepareOptions(tokenizer, file_tokens=5000))
    return {name: home / name for name in ("bytes", "words")}


def token_files(folder: Path, *settings: str) -> tuple[str, ...]:
    return ("data.source.kind=token_files", f"data.source.paths={folder}", *settings)


def mixture(folders: dict[str, Path], text_folder: Path) -> tuple[str, ...]:
    """Return settings of a mixture; `data.source.path` belongs to another kind."""
    sources = {
        "prepared": {
            "source": {"kind": "token_files", "paths": str(folders["bytes"])},
            "weight": 3,
            "max_passes": 4,
        },
        "plain": {"source": {"kind": "text_folder", "path": str(text_folder)}},
    }
    return ("data.source.kind=mixture", f"data.source.sources={json.dumps(sources)}")


def train(config, resume: Path | None = None):
    manifest = None if resume is None else read_manifest(find_checkpoint(resume))
    console = Console(file=io.StringIO(), width=500)
    outcome = loop.train(config, resume=manifest, console=console)
    return outcome, console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def losses(folder: Path) -> list[float]:
    records = read_metrics(folder / "metrics.jsonl")
    return [each.loss for each in records if isinstance(each, StepRecord)]


@pytest.fixture
def make(make_config, tmp_path):
    """As `make_config`, of any source."""
    from olmo_trainer.overrides import apply_overrides
    from olmo_trainer.recipes import nano

    def make(*settings: str, run: str = "run"):
        base = ("data.sequence_length=32", "run.heldout_every=0", "run.sample_bytes=0")
        base = (*base, "run.threads=1", f"run.folder={tmp_path / run}")
        return apply_overrides(nano(), [*base, *settings]).for_world(1)

    return make


def test_a_run_on_token_files_learns_and_speaks_its_tokenizers_words(make, folders, tmp_path):
    config = make(
        *token_files(folders["words"], "model.vocab_size=512", "data.attend=document"),
        *("data.filter.kind=repeats", "steps=8", "run.sample_bytes=12"),
        "optimizer.learning_rate=0.01",
    )
    batch = open_data(config).global_batch(0)
    assert batch.documents_BS is not None
    outcome, printed = train(config)
    assert outcome.finished
    found = losses(tmp_path / "run")
    assert found[-1] < found[0] - 0.5
    assert "12 documents," in printed
    assert "nats a token" in printed
    assert "nats a byte" not in printed
    assert "bits a byte" not in printed
    tokenizer = open_tokenizer(config)
    assert tokenizer.decode(tokenizer.encode("abc def")) == "abc def"
    assert "\ndef " in printed
    report = (tmp_path / "run" / "report.html").read_text()
    assert "Held-out loss" in report


def test_a_vocabulary_larger_than_the_models_is_refused(make, folders):
    with pytest.raises(ValueError, match=r"a vocabulary of 367 ids, .* \(257\); set model.vocab"):
        open_data(make(*token_files(folders["words"])))
    raw = folders["words"] / "tokens-00000.bin"
    config = make(*token_files(raw, "data.source.dtype=uint16", "data.source.end_of_document=0"))
    with pytest.raises(ValueError, match=r"ids must be in \[0, 257\), the model's vocabulary, got"):
        open_data(config)


def test_raw_files_train_without_a_sample(make, folders):
    raw = folders["bytes"] / "tokens-*.bin"
    settings = ("data.source.dtype=uint16", "data.source.end_of_document=256", "steps=1")
    outcome, printed = train(make(*token_files(raw, *settings), "run.sample_bytes=5"))
    assert outcome.finished
    assert "no sample: data.source.paths must hold a folder that `prepare` wrote" in printed


def test_a_mixture_stops_and_resumes_bitwise(make, folders, text_folder, tmp_path):
    settings = (*mixture(folders, text_folder), "steps=9", "batch.sequences=48")
    settings = (*settings, "data.filter.kind=repeats", "data.heldout_fraction=0.49")
    data = open_data(make(*settings))
    assert data.order.passes(3)["prepared"] < 1 < data.order.passes(9)["prepared"]
    train(make(*settings, run="straight"))
    train(make(*settings, "run.save_every=3", "batch.accumulation=3", run="parts"))
    for step in (3, 6):
        start = tmp_path / "parts" / "checkpoints" / f"step-{step:08d}"
        train(make(*settings, "batch.accumulation=3", run=f"from-{step}"), start)
        assert losses(tmp_path / f"from-{step}") == losses(tmp_path / "parts")[step:]
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "straight"), rel=1e-4)
    changed = make(*settings, "data.filter.max_count=31", run="changed")
    with pytest.raises(CheckpointError, match="trained on other data"):
        train(changed, start)


def test_the_end_of_the_data_ends_the_run_cleanly(make, folders, tmp_path):
    config = make(
        *token_files(folders["bytes"], "data.max_passes=1", "steps=1000"), "batch.sequences=32"
    )
    data = open_data(config)
    most = len(data.train) // 32
    assert end_with_data(config, data).steps == most < 1000
    outcome, printed = train(config)
    assert outcome.finished
    assert outcome.step == most
    assert f"the data end after step {most}: no more passes are allowed" in printed
    assert f"passes in {most} steps: {most * 32 / len(data.train):.2f}" in printed
    rates = [
        each.learning_rate
        for each in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if isinstance(each, StepRecord)
    ]
    assert rates[-1] < 0.2 * max(rates)  # the schedule ends with the data
    before = {file: file.stat().st_mtime_ns for file in outcome.checkpoint.iterdir()}
    assert train(config, tmp_path / "run")[0] is None
    assert {file: file.stat().st_mtime_ns for file in outcome.checkpoint.iterdir()} == before
    few = make(*token_files(folders["bytes"], "data.max_passes=1", "batch.sequences=100000"))
    with pytest.raises(ValueError, match=r"at least one step of batch.sequences \(100000\), got"):
        end_with_data(few, open_data(few))


def test_limits_of_a_mixture_reach_the_order(make, folders, text_folder):
    shares = open_data(make(*mixture(folders, text_folder), "data.max_passes=9")).order.shares
    assert [(each.name, each.weight, each.max_passes) for each in shares] == [
        ("prepared", 3, 4),
        ("plain", 1, 9),
    ]


def test_verify_keeps_the_documents_of_its_batches(make, folders):
    settings = token_files(folders["bytes"], "data.attend=document", "batch.sequences=12")
    batch = open_data(make(*settings)).global_batch(0)
    assert batch.documents_BS is not None
    halves = split_batch(make_scenario(batch, "ragged", pad_id=0), 2)
    kept = [half.documents_BS for half in halves]
    assert [each.tolist() for each in kept if each is not None] == [
        batch.documents_BS[:6].tolist(),
        batch.documents_BS[6:].tolist(),
    ]
