"""`--continue`: the same command starts a run, goes on with it, and leaves a finished one alone."""

import os
import signal
import threading
from pathlib import Path

import pytest
from olmo_trainer import loop
from olmo_trainer.checkpoint_manifest import newest_step
from olmo_trainer.cli import main
from olmo_trainer.metrics import StepRecord, read_metrics


@pytest.fixture
def command(text_folder, tmp_path):
    """Return a function: steps to a command line; its run saves after every second step."""

    def make(steps: int) -> list[str]:
        settings = (
            *("data.source.kind=text_folder", f"data.source.path={text_folder}"),
            *("data.sequence_length=32", "run.heldout_every=0", "run.sample_bytes=0"),
            *("run.threads=1", "run.save_every=2", f"run.folder={tmp_path / 'run'}"),
        )
        words = [word for setting in settings for word in ("--set", setting)]
        return ["nano", "--continue", "--steps", str(steps), *words]

    return make


def _losses(run: Path) -> list[tuple[int, float]]:
    records = read_metrics(run / "metrics.jsonl")
    return [(each.step, each.loss) for each in records if isinstance(each, StepRecord)]


def _files(run: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}


def test_one_command_starts_goes_on_and_is_done(command, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    original = loop.update

    def crash(assembly, step, rate):
        if step == crash.at:
            raise RuntimeError("a broken machine")
        return original(assembly, step, rate)

    monkeypatch.setattr(loop, "update", crash)
    # Before anything was saved; after; and then not again.
    for crash.at, reached in ((2, -1), (5, 4)):
        with pytest.raises(RuntimeError, match="a broken machine"):
            main(command(6))
        assert newest_step(run) == reached
    crash.at = 0
    assert main(command(6)) == 0
    assert "continuing" in capsys.readouterr().out
    assert [step for step, _ in _losses(run)] == [1, 2, 3, 4, 5, 6]
    before = _files(run)
    assert main(command(6)) == 0
    assert "already at step 6 of 6; nothing to do" in capsys.readouterr().out.replace("\n", "")
    assert _files(run) == before


def test_a_folder_must_be_named(capsys):
    assert main(["nano", "--continue"]) == 2
    assert "--continue needs the run's folder" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["nano", "--continue", "--resume", "somewhere"])
    assert stop.value.code == 2


def test_damage_is_said_and_a_run_whose_every_checkpoint_is_damaged_is_kept(
    command, tmp_path, capsys
):
    run = tmp_path / "run"
    assert main(command(4)) == 0
    newest = run / "checkpoints" / "step-00000004"
    file = newest / "tensors-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert main(command(6)) == 0
    assert f"left out {newest}: damaged" in capsys.readouterr().out.replace("\n", "")
    # Step 4 was lived again from step 2, and is whole now.
    assert sorted(path.name for path in newest.parent.iterdir()) == [
        f"step-{step:08d}" for step in (2, 4, 6)
    ]
    assert main(["inspect", str(newest)]) == 0
    for path in newest.parent.iterdir():
        (path / "tensors.json").unlink()
    before = _files(run)
    assert main(command(8)) == 2
    assert "no whole checkpoint here" in capsys.readouterr().err
    assert _files(run) == before


@pytest.mark.parametrize("by", ["a file", "SIGTERM"])
def test_a_stop_is_no_failure_and_the_command_goes_on(command, tmp_path, monkeypatch, by):
    run, original = tmp_path / "run", loop.update

    def update(assembly, step, rate):
        if step == 3:
            if by == "a file":
                (run / "stop").touch()
            else:
                os.kill(os.getpid(), signal.SIGTERM)
        return original(assembly, step, rate)

    assert threading.current_thread() is threading.main_thread()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", update)
        assert main(command(8)) == 0
    assert newest_step(run) == 4
    assert (run / "stop").exists() == (by == "a file")
    assert main(command(8)) == 0
    assert newest_step(run) == 8
    assert not (run / "stop").exists()
    assert [step for step, _ in _losses(run)] == list(range(1, 9))
