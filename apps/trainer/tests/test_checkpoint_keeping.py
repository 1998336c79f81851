"""Which checkpoints stay when a new one is whole."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_trainer import checkpoint_manifest
from olmo_trainer.checkpoint_manifest import (
    Manifest,
    checkpoint_path,
    delete_expired,
    discard_leftovers,
    newest_step,
    write_manifest,
)
from olmo_trainer.config import RunConfig
from olmo_trainer.recipes import nano


def _save(run: Path, step: int) -> Path:
    path = checkpoint_path(run, step)
    path.mkdir(parents=True)
    (path / "file").write_bytes(b"1234")
    write_manifest(path, Manifest(path, step, nano(), "", {}, {"file": 4}, {}))
    return path


def _steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").iterdir())


@settings(max_examples=15, deadline=None)
@given(last=st.integers(0, 4), every=st.integers(0, 4), count=st.integers(1, 8))
def test_the_newest_and_the_milestones_stay(tmp_path_factory, last, every, count):
    run = tmp_path_factory.mktemp("run")
    for step in range(1, count + 1):
        _save(run, step)
        delete_expired(run, keep_last=last, keep_every=every)
    newest = set(range(max(1, count - last + 1), count + 1)) if last else set(range(1, count + 1))
    milestones = {step for step in range(1, count + 1) if every and step % every == 0}
    assert _steps(run) == sorted(newest | milestones)


def test_a_damaged_one_does_not_take_the_place_of_a_whole_one(tmp_path):
    for step in (1, 2, 3):
        _save(tmp_path, step)
    (checkpoint_path(tmp_path, 3) / "file").write_bytes(b"")
    assert delete_expired(tmp_path, keep_last=1, keep_every=0) == [1]
    assert newest_step(tmp_path) == 2


def test_a_kill_during_the_deletion_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    for step in (1, 2):
        _save(tmp_path, step)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_manifest.shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            delete_expired(tmp_path, keep_last=1, keep_every=0)
    assert not checkpoint_path(tmp_path, 1).exists()
    assert newest_step(tmp_path) == 2
    discard_leftovers(tmp_path)
    assert _steps(tmp_path) == [2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"keep_every": 200}, r"keep_every \(200\) needs keep_last >= 1"),
        ({"keep_every": 300, "keep_last": 1}, r"must be a multiple of save_every \(200\)"),
        ({"keep_every": 200, "keep_last": 1, "save_every": 0}, "must be a multiple of save_every"),
    ],
)
def test_options_that_would_do_nothing_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**values)
