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


def _turn_a_bit(checkpoint: Path, place: int = -1) -> None:
    file = checkpoint / "tensors-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_a_bit_that_turned_is_named_and_the_next_older_one_taken(command, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(command(6)) == 0
    folder = run / "checkpoints"
    for step in (4, 6):
        _turn_a_bit(folder / f"step-{step:08d}")
    before = _files(run)
    assert main(["--resume", str(run), "--steps", "8"]) == 2
    said = capsys.readouterr().err
    assert f"{folder / 'step-00000006'}: damaged: its tensors cannot be read (rank 0: " in said
    assert f"use an older checkpoint: {folder / 'step-00000004'}, in a run of its own with" in said
    assert f"or go on here with --continue --set run.folder={run}, which takes" in said
    assert _files(run) == before
    assert main(command(8)) == 0
    said = capsys.readouterr().out
    for step in (6, 4):
        checkpoint = f"{folder / f'step-{step:08d}'}"
        assert f"DAMAGED: {checkpoint}: rank 0: ValueError: {checkpoint}/tensors-00000" in said
        assert f"it is step-{step:08d}.damaged from now on. Going on from step-00000002\n" in said
    assert "continuing" in said
    assert [step for step, _ in _losses(run)] == list(range(1, 9))
    names = [f"step-{step:08d}" for step in (2, 4, 6, 8)]
    aside = [f"{name}.damaged" for name in names[1:3]]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names + aside)
    for path in names[1:3]:  # byte for byte what they were
        for file, at in before.items():
            if file.parent.name == path:
                assert (folder / f"{path}.damaged" / file.name).stat().st_mtime_ns == at
    # A second of the same step gets a name of its own.
    _turn_a_bit(folder / "step-00000008")
    _turn_a_bit(folder / "step-00000006")
    assert main(command(10)) == 0
    assert "it is step-00000006.damaged-2 from now on" in capsys.readouterr().out


def test_the_last_step_is_lived_again_where_its_checkpoint_is_damaged(command, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(command(4)) == 0
    lived = _losses(run)
    _turn_a_bit(run / "checkpoints" / "step-00000004")
    assert main(command(4)) == 0
    assert "it is step-00000004.damaged from now on. Going on from" in capsys.readouterr().out
    assert _losses(run) == lived
    assert main(["export", str(run), str(tmp_path / "exported")]) == 0


def test_a_run_without_a_sound_checkpoint_is_left_as_it_is(command, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(command(4)) == 0
    for step in (2, 4):
        _turn_a_bit(run / "checkpoints" / f"step-{step:08d}")
    before = _files(run)
    assert main(command(6)) == 2
    said = capsys.readouterr().err
    assert "no checkpoint is as it was written, and none is left: " in said
    assert "step-00000002" in said
    assert "step-00000004" in said
    assert _files(run) == before


def test_a_damaged_one_that_cannot_be_set_aside_is_an_error(command, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    assert main(command(4)) == 0
    _turn_a_bit(run / "checkpoints" / "step-00000004")

    def refuse(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "rename", refuse)
    assert main(command(6)) == 2
    assert "damaged, and cannot be set aside: rank 0: PermissionE" in capsys.readouterr().err


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
