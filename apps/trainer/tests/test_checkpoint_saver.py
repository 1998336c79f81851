"""Saving beside training: from a copy, one at a time, and what happens when it fails."""

import io
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from olmo_trainer import checkpoint_saver, checkpoint_storage, cli, loop
from olmo_trainer.build import assemble
from olmo_trainer.checkpoint import SaveError, load_checkpoint, state_of
from olmo_trainer.checkpoint_manifest import find_checkpoint, read_manifest
from olmo_trainer.checkpoint_saver import CheckpointSaver
from olmo_trainer.mesh import create_mesh
from rich.console import Console

CPU = torch.device("cpu")


def _saver(assembly, run: Path, said: list[str]) -> CheckpointSaver:
    return CheckpointSaver(assembly, run, data_fingerprint="", versions={}, say=said.append)


def _train(config):
    return loop.train(config, resume=None, console=Console(file=io.StringIO(), width=200))


def _values(assembly) -> dict[str, torch.Tensor]:
    return {
        name: (value if name == "step" else value.local).clone()
        for name, value in state_of(assembly).items()
    }


class _Gate:
    """Holds writers of tensors at its door, or sends them away."""

    def __init__(self, monkeypatch) -> None:
        self.open, self.reached, self.errors = threading.Event(), threading.Event(), 0
        self._write = checkpoint_storage.write_tensors
        monkeypatch.setattr(checkpoint_storage, "write_tensors", self)

    def __call__(self, *arguments):
        self.reached.set()
        assert self.open.wait(30)
        if self.errors:
            self.errors -= 1
            raise OSError(28, "No space left on device")
        return self._write(*arguments)


def test_what_is_written_is_the_state_when_it_was_asked_for(make_config, tmp_path, monkeypatch):
    config = make_config("steps=3")
    assembly = assemble(config, create_mesh(config.layout, CPU))
    gate, before = _Gate(monkeypatch), _values(assembly)
    saver = _saver(assembly, tmp_path / "run", [])
    saver.save(1)
    assert gate.reached.wait(30)
    for name, value in state_of(assembly).items():  # training goes on
        (value if name == "step" else value.local).add_(1)
    assert not (tmp_path / "run" / "checkpoints" / "step-00000001").exists()
    gate.open.set()
    saved = saver.wait()
    assert saved is not None
    load_checkpoint(assembly, read_manifest(saved))
    for name, value in _values(assembly).items():
        assert torch.equal(value, before[name]), name


def test_training_goes_on_while_files_are_written(make_config, tmp_path, monkeypatch):
    gate, steps = _Gate(monkeypatch), []
    original = loop.update

    def update(assembly, step, rate):
        steps.append(step)
        if step == 4:  # the save after step 2 has not written a byte
            assert gate.reached.is_set()
            assert not list((tmp_path / "run" / "checkpoints").glob("step-*[0-9]"))
            gate.open.set()
        return original(assembly, step, rate)

    monkeypatch.setattr(loop, "update", update)
    outcome = _train(make_config("steps=5", "run.save_every=2"))
    assert outcome is not None
    assert steps == [1, 2, 3, 4, 5]
    names = sorted(path.name for path in outcome.checkpoint.parent.iterdir())
    assert names == ["step-00000002", "step-00000004", "step-00000005"]


def test_blocking_and_background_write_the_same_bytes(make_config, tmp_path):
    files = []
    for mode in ("blocking", "background"):
        outcome = _train(make_config("steps=2", f"run.save_mode={mode}", run=mode))
        assert outcome is not None
        files.append((outcome.checkpoint / "tensors-00000.safetensors").read_bytes())
    assert files[0] == files[1]


def test_a_failed_save_is_done_again_at_once(make_config, tmp_path, monkeypatch):
    gate = _Gate(monkeypatch)
    gate.errors = 1
    gate.open.set()
    original, seen = loop.accumulate_gradients, []

    def wait_for_the_failure(assembly, batches, **options):
        seen.append(options["save_failed"])
        original(assembly, batches, **options)

    monkeypatch.setattr(loop, "accumulate_gradients", wait_for_the_failure)
    thread = checkpoint_saver.threading.Thread

    def joined(*arguments, **options):  # the failure is there before the next step
        made = thread(*arguments, **options)
        start = made.start
        made.start = lambda: (start(), made.join())
        return made

    monkeypatch.setattr(checkpoint_saver.threading, "Thread", joined)
    outcome = _train(make_config("steps=6", "run.save_every=3", "run.watchdog_seconds=0"))
    assert outcome is not None
    assert seen == [False, False, False, True, False, False]
    names = sorted(path.name for path in outcome.checkpoint.parent.iterdir())
    assert names == ["step-00000004", "step-00000006"]  # 3 failed, 4 in its place


def test_a_save_that_fails_twice_ends_the_run_with_the_reason(make_config, monkeypatch, tmp_path):
    gate = _Gate(monkeypatch)
    gate.open.set()
    config = make_config("steps=3")
    assembly = assemble(config, create_mesh(config.layout, CPU))
    said: list[str] = []
    saver = _saver(assembly, tmp_path / "run", said)
    first = saver.save_now(1)
    gate.errors = 2
    saver.save(2)
    with pytest.raises(SaveError, match=r"step-00000003: not saved: rank 0: OSError: .*No space"):
        saver.save_now(3)
    assert len(said) == 2
    assert find_checkpoint(tmp_path / "run") == first
    assert saver.save_now(3).name == "step-00000003"  # there is space again


def test_the_program_says_that_it_could_not_save(make_config, monkeypatch, tmp_path, capsys):
    gate = _Gate(monkeypatch)
    gate.open.set()
    gate.errors = 1
    assert cli.main(["nano", "--steps", "1", "--set", f"run.folder={tmp_path / 'run'}"]) == 1
    assert "not saved: rank 0: OSError" in capsys.readouterr().err


def test_old_checkpoints_go_when_a_new_one_is_there(make_config):
    outcome = _train(
        make_config("steps=7", "run.save_every=1", "run.keep_last=2", "run.keep_every=3")
    )
    assert outcome is not None
    names = sorted(path.name for path in outcome.checkpoint.parent.iterdir())
    assert names == [f"step-{step:08d}" for step in (3, 6, 7)]


def test_a_stop_request_waits_for_the_save_in_hand_and_saves(make_config, monkeypatch):
    gate, original = _Gate(monkeypatch), loop.update

    def update(assembly, step, rate):
        if step == 3:  # step 2 is being written
            assert gate.reached.is_set()
            threading.Timer(0.2, gate.open.set).start()
            os.kill(os.getpid(), signal.SIGTERM)
        return original(assembly, step, rate)

    monkeypatch.setattr(loop, "update", update)
    outcome = _train(make_config("steps=9", "run.save_every=2"))
    assert outcome is not None
    assert not outcome.finished
    names = sorted(path.name for path in outcome.checkpoint.parent.iterdir())
    assert names == ["step-00000002", "step-00000004"]
    assert outcome.checkpoint.name == "step-00000004"


def test_an_error_in_training_lets_the_save_in_hand_finish(make_config, tmp_path, monkeypatch):
    gate, original = _Gate(monkeypatch), loop.update

    def update(assembly, step, rate):
        if step == 3:
            threading.Timer(0.2, gate.open.set).start()
            raise RuntimeError("a broken machine")
        return original(assembly, step, rate)

    monkeypatch.setattr(loop, "update", update)
    with pytest.raises(RuntimeError, match="a broken machine"):
        _train(make_config("steps=9", "run.save_every=2"))
    assert find_checkpoint(tmp_path / "run").name == "step-00000002"
