"""What trackers get: every number of the log under a name, also when steps are lived again."""

import json
import sys
import types
import warnings
from pathlib import Path

import pytest
from olmo_trainer.metrics import HeldoutRecord, RanksRecord, RunHeader, StepRecord
from olmo_trainer.trackers import Tracking, numbers_of, require_trackers


def _step(step: int, loss: float = 2.0) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        balance_loss=1.0,
        auxiliary_loss=0.0,
        z_loss=0.0,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=10,
        seconds=1.0,
        tokens_per_second=10.0,
        expert_counts=[[1, 2], [3, 4]],
        imbalance=[1.5, 1.25],
        honesty=[1.0, 1.0],
        entropy_deficit=[0.0, 0.0],
        dead_experts=[0, 1],
        balance={"topk_margin": [0.25, 0.5]},
        phase_seconds={"data": 0.125},
    )


def _open(kind, folder: Path, first: int = 0, said: list[str] | None = None) -> Tracking:
    say = (said if said is not None else []).append
    return Tracking([kind], folder, name="a b", config={"x": 1}, first_step=first, say=say)


def test_every_number_has_a_name():
    numbers = dict(numbers_of(_step(3)))
    assert numbers["train/loss"] == 2.0
    assert numbers["train/imbalance/1"] == 1.25
    assert numbers["train/balance/topk_margin/1"] == 0.5
    assert numbers["train/phase_seconds/data"] == 0.125
    assert "train/worst_imbalance" not in numbers  # not measured
    assert not any("expert_counts" in name or name.endswith("/step") for name in numbers)
    heldout = HeldoutRecord(step=3, loss=1.0, tokens=5, seconds=1.0, source_losses={"web": 1.5})
    assert dict(numbers_of(heldout))["heldout/source_losses/web"] == 1.5
    ranks = RanksRecord(step=3, own_seconds=[0.1, 0.2], memory_bytes={"peak": [7, 8]})
    assert dict(numbers_of(ranks))["ranks/memory_bytes/peak/1"] == 8
    assert not dict(numbers_of(RunHeader(step=0, info={"a": 1})))


def test_tensorboard_reads_one_true_history(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what tensorboard itself imports
        with _open("tensorboard", tmp_path) as tracking:
            for step in (1, 2, 3):
                tracking.write(_step(step, loss=float(step)))
        with _open("tensorboard", tmp_path, first=1) as tracking:  # from a checkpoint of step 1
            tracking.write(_step(2, loss=20.0))
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == [(1, 1), (2, 20)]
    assert events.Scalars("train/dead_experts/1")[-1].value == 1


class _FakeRun:
    def __init__(self, calls: list) -> None:
        self.calls = calls

    def __getattr__(self, name):
        return lambda *arguments, **options: self.calls.append((name, arguments, options))


def _fake_wandb(monkeypatch) -> list:
    calls: list = []
    module = types.ModuleType("wandb")

    def init(**options):
        calls.append(("init", (), options))
        return _FakeRun(calls)

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_wandb_gets_one_run_and_the_step_as_its_axis(tmp_path, monkeypatch):
    calls = _fake_wandb(monkeypatch)
    for first in (0, 1):
        with _open("wandb", tmp_path, first=first) as tracking:
            tracking.write(_step(first + 1))
    opened = [options for name, _, options in calls if name == "init"]
    assert opened[0]["id"] == opened[1]["id"]
    assert opened[0]["id"].startswith("a-b-")
    assert opened[0]["resume"] == "allow"
    assert opened[0]["config"] == {"x": 1}
    logged = [arguments[0] for name, arguments, _ in calls if name == "log"]
    assert [each["step"] for each in logged] == [1, 2]
    assert logged[0]["train/loss"] == 2.0
    assert ("define_metric", ("*",), {"step_metric": "step"}) in calls
    assert [name for name, _, _ in calls].count("finish") == 2


def test_the_real_wandb_takes_it_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what wandb itself imports
        import wandb

        for first in (0, 1):
            with _open("wandb", tmp_path, first=first, said=said) as tracking:
                tracking.write(_step(first + 1))
        wandb.teardown()
    assert not said
    kept = sorted(tmp_path.glob("wandb/offline-run-*/run-a-b-*.wandb"))
    assert kept
    assert len({path.name for path in kept}) == 1  # one run, whichever process goes on with it
    for path in kept:
        content = path.read_bytes()
        assert all(name in content for name in (b"train/loss", b"train/dead_experts/1", b"step"))


def test_a_tracker_that_fails_is_given_up_once_and_the_others_go_on(tmp_path, monkeypatch):
    calls, said = _fake_wandb(monkeypatch), []
    with _open("wandb", tmp_path, said=said) as tracking:
        monkeypatch.setattr(_FakeRun, "__getattr__", lambda *_: json.loads("{"))
        for step in (1, 2):
            tracking.write(_step(step))
    assert len(said) == 1
    assert said[0].startswith("wandb is given up, the run goes on: JSONDecodeError")
    assert [name for name, _, _ in calls].count("init") == 1


def test_a_package_that_is_not_there_is_named_before_any_work(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"--package olmo-trainer --extra wandb"):
        require_trackers(["wandb"])
    from olmo_trainer.cli import main

    settings = ["--set", "run.trackers=wandb", "--set", f"run.folder={tmp_path / 'run'}"]
    assert main(["nano", "--steps", "1", *settings]) == 2
    assert "run.trackers = 'wandb' needs the package wandb" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
