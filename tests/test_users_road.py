"""A new user's whole road, in the words of the READMEs: own text, a stop, two processes, export."""

import os
import re
import signal
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from forked_program import ForkedProgram
from olmo_trainer.checkpoint_manifest import newest_step
from olmo_trainer.metrics import HeldoutRecord, StepRecord, read_metrics

LINES = (
    "the cat sat on the mat and looked at the moon",
    "a dog ran over the hill to the old house",
    "rain fell on the roof of the small red barn",
)
STEPS = 150


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with notes in it; what is no text is there too."""
    notes = tmp_path / "notes"
    notes.mkdir()
    for index in range(20):
        lines = [LINES[(index + turn) % 3] for turn in range(40)]
        (notes / f"{index:02}.txt").write_text("\n".join(lines) + "\n")
    (notes / "picture.txt").write_bytes(b"\x89PNG\xff\x00")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def program(home: Path) -> Iterator[ForkedProgram]:
    with ForkedProgram(home) as program:
        yield program


def _records(run: Path, kind: type) -> list:
    path = run / "metrics.jsonl"
    return [each for each in read_metrics(path) if isinstance(each, kind)] if path.exists() else []


def _generate(export: Path, prompt: str, num_bytes: int) -> str:
    """Continue a text as `transformers` does, by the likeliest byte."""
    transformers = import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(export, trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(export, trust_remote_code=True)
    begun = torch.tensor([[tokenizer.eos_token_id, *tokenizer(prompt)["input_ids"]]])
    made = model.eval().generate(begun, max_new_tokens=num_bytes, do_sample=False)
    return tokenizer.decode(made[0, 1:], skip_special_tokens=True)


@pytest.mark.dist
def test_from_own_text_to_a_model_in_transformers(program, home, monkeypatch, tmp_path_factory):
    run, export = home / "mine", home / "exported"

    def words(*settings: str) -> list[str]:
        return [word for setting in settings for word in ("--set", setting)]

    def do(*arguments: str) -> str:
        pid = program.start(arguments)
        assert program.wait(pid) == 0, program.output(pid)
        return program.output(pid)

    train = [
        *("nano", "--steps", str(STEPS), "--set", f"run.folder={run}"),
        *words("data.source.kind=text_folder", "data.source.path=~/notes", "run.threads=1"),
        *words("run.heldout_every=0", "optimizer.learning_rate=0.01"),
    ]
    assert "data.source.path = " in do(*train, "--dry-run")
    assert not run.exists()

    # Train, and stop in the middle.
    pid = program.start(train)
    deadline = time.monotonic() + 60
    while len(_records(run, StepRecord)) < 10 and not program.ended(pid):
        assert time.monotonic() < deadline, program.output(pid)
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    assert program.wait(pid) == 130, program.output(pid)
    said = program.output(pid)
    assert "left out 1 files that are no text, as picture.txt" in said
    stopped = newest_step(run)
    assert 10 <= stopped < STEPS
    assert f"stopped after step {stopped}, as asked" in said

    # Look at it, and resume on two processes that share the experts.
    assert do("report", str(run)).strip() == str(run / "report.html")
    ranks = program.start_ranks(["--resume", str(run), *words("layout.expert=2")], 2)
    assert [program.wait(rank) for rank in ranks] == [0, 0], program.output(ranks[0])
    assert f"continuing {run} after step {stopped}" in program.output(ranks[0])
    steps = _records(run, StepRecord)
    assert [each.step for each in steps] == list(range(1, STEPS + 1))
    heldout = _records(run, HeldoutRecord)
    assert heldout[-1].loss < 0.3 * heldout[0].loss  # it has learned the lines
    page = (run / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    # Nothing is fetched: what is left of the network are the names of XML's namespaces.
    links = set(re.findall(r"https?://[^\"'<> ]+", page))
    assert links <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.findall(r"<(?:link|script)[^>]+(?:src|href)=", page)

    # Sample, export, and the same words from `transformers`.
    prompt, num_bytes = "the cat ", 30
    sampled = do(
        *("sample", str(run), "--prompt", prompt),
        *("--bytes", str(num_bytes), "--temperature", "0"),
    )
    assert sampled.startswith(LINES[0][: len(prompt) + 4])
    assert "trust_remote_code=True" in do("export", str(run), str(export))
    modules = import_module("transformers.dynamic_module_utils")
    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
    assert _generate(export, prompt, num_bytes) == sampled.removesuffix("\n")
