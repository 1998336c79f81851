"""What follows the last checkpoint of a run may be left out, and never fails the run."""

import io
import json

import pytest
from olmo_trainer import end_of_run, loop
from olmo_trainer.cli import main
from olmo_trainer.config import RunConfig
from olmo_trainer.recipes import RECIPES
from olmo_trainer.run_folder import SAMPLE
from olmo_trainer.sizes import count_parameters
from rich.console import Console

SHORT = ("steps=2", "run.sample_bytes=5")


def _train(config):
    console = Console(file=io.StringIO(), width=500)
    return loop.train(config, resume=None, console=console), console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def _fail(error: BaseException):
    def fail(*_, **__):
        raise error

    return fail


def test_a_finished_run_draws_a_sample_and_a_report(make_config, tmp_path):
    outcome, said = _train(make_config(*SHORT))
    assert outcome is not None
    assert outcome.report == tmp_path / "run" / "report.html"
    sample = (tmp_path / "run" / SAMPLE).read_text()
    assert sample.startswith("def ")
    assert "no sample" not in said
    assert f"report     {outcome.report}" in said


def test_a_stopped_run_loads_no_model_and_draws_nothing(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "conclude", _fail(AssertionError("the end of a run that goes on")))
    original = loop.update

    def update(assembly, step, rate):
        (tmp_path / "run" / "stop").touch()
        return original(assembly, step, rate)

    monkeypatch.setattr(loop, "update", update)
    outcome, said = _train(make_config(*SHORT, "steps=9"))
    assert outcome is not None
    assert (outcome.finished, outcome.report) == (False, None)
    assert outcome.checkpoint.is_dir()
    assert "as asked" in said
    assert f"checkpoint {outcome.checkpoint}" in said
    written = {entry.name for entry in (tmp_path / "run").iterdir()}
    assert written == {"checkpoints", "metrics.jsonl", "stop"}


def test_a_model_over_the_limit_is_not_loaded_and_a_word_says_so(
    make_config, tmp_path, monkeypatch
):
    size = count_parameters(make_config().model).total
    outcome, said = _train(make_config(*SHORT, f"run.sample_parameters={size}", run="within"))
    assert outcome is not None
    assert (tmp_path / "within" / SAMPLE).is_file()
    monkeypatch.setattr(end_of_run, "load_model", _fail(AssertionError("loaded")))
    outcome, said = _train(make_config(*SHORT, f"run.sample_parameters={size - 1}"))
    assert outcome is not None
    assert outcome.report is not None
    assert not (tmp_path / "run" / SAMPLE).exists()
    words = f"no sample: {size:,} parameters are more than run.sample_parameters ({size - 1:,})"
    assert words in said
    assert "AssertionError" not in said


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("load_model", MemoryError("no room\nfor it"), "no sample: MemoryError: no room for it; "),
        ("continue_text", RuntimeError("alloc"), "no sample: RuntimeError: alloc; the run is done"),
        ("open_tokenizer", OSError("gone"), "no sample: OSError: gone; the run is done and saved"),
        ("_report", ValueError("bad line"), "no report: bad line; the run is done and saved"),
    ],
)
def test_what_fails_after_the_checkpoint_is_one_line_and_exit_code_0(
    tmp_path, monkeypatch, capsys, name, error, words
):
    monkeypatch.setattr(end_of_run, name, _fail(error))
    folder, settings = tmp_path / "run", (*SHORT, "run.threads=1", "run.heldout_every=0")
    options = [each for value in settings for each in ("--set", value)]
    assert main(["nano", *options, "--set", f"run.folder={folder}"]) == 0
    checkpoint = folder / "checkpoints" / "step-00000002"
    assert checkpoint.is_dir()
    said = capsys.readouterr().out
    assert sum(words in line for line in said.splitlines()) == 1
    assert f"checkpoint {checkpoint}" in said.replace("\n", "")
    assert (folder / "report.html").exists() == (name != "_report")
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2


def test_recipes_sample_from_small_models_alone():
    limit = RunConfig().sample_parameters
    for name, recipe in RECIPES.items():
        config = recipe()
        is_small = count_parameters(config.model).total <= limit
        assert (config.run.sample_bytes > 0) == is_small, name
