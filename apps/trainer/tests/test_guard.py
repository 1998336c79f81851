"""A step that would do harm is left out: no bit of the run moves, and it is counted and said."""

import io
import math
from pathlib import Path

import pytest
import torch
from olmo_trainer import loop
from olmo_trainer.checkpoint import state_of
from olmo_trainer.checkpoint_manifest import find_checkpoint, read_manifest
from olmo_trainer.metrics import StepRecord, read_metrics
from olmo_trainer.overrides import ConfigError, apply_overrides
from olmo_trainer.progress import log_line
from olmo_trainer.recipes import nano
from olmo_trainer.step import NonFiniteError, accumulate_gradients
from rich.console import Console

SKIP = ("guard.kind=skip", "guard.window=4", "guard.least_history=3", "guard.limit=60")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _train(config, resume: Path | None = None) -> str:
    said = io.StringIO()
    manifest = None if resume is None else read_manifest(find_checkpoint(resume))
    loop.train(config, resume=manifest, console=Console(file=said, width=200))
    return said.getvalue()


def _steps(folder: Path) -> list[StepRecord]:
    records = read_metrics(folder / "metrics.jsonl")
    return [each for each in records if isinstance(each, StepRecord)]


def _tensors(assembly) -> dict[str, torch.Tensor]:
    state = {
        name: getattr(each, "local", each).clone() for name, each in state_of(assembly).items()
    }
    return state | {name: each.detach().clone() for name, each in assembly.parameters}


@pytest.fixture(autouse=True)
def _no_report(monkeypatch):
    monkeypatch.setattr(loop._Run, "_conclude", lambda self, heldout, saved: saved)


@pytest.fixture
def spoil(monkeypatch):
    """Return a function: spoil steps by what is done to their assembly; `snapshots` after each."""
    snapshots: list[dict[str, torch.Tensor]] = []

    def plant(faults):
        count = 0

        def accumulate(assembly, batches, **options):
            nonlocal count
            snapshots.append(_tensors(assembly))
            accumulate_gradients(assembly, batches, **options)
            count += 1
            if count in faults:
                faults[count](assembly)

        monkeypatch.setattr(loop, "accumulate_gradients", accumulate)
        return snapshots

    return plant


def _nan_gradient(assembly) -> None:
    _, parameter = assembly.parameters[3]
    parameter.main_grad.view(-1)[0] = math.nan


def _nan_loss(assembly) -> None:
    assembly.statistics.vector[0] = math.nan


def _loss_spike(assembly) -> None:
    assembly.statistics.vector[0] *= 1000


def _gradient_spike(assembly) -> None:
    for _, parameter in assembly.parameters:
        parameter.main_grad *= 1000


@pytest.mark.parametrize(
    ("fault", "reason", "optimizer"),
    [
        (_nan_gradient, "norm not finite", "adamw"),
        (_nan_gradient, "norm not finite", "muon"),
        (_nan_loss, "loss not finite", "adamw"),
        (_loss_spike, "loss spikes", "muon"),
        (_gradient_spike, "norm spikes", "adamw"),
    ],
)
def test_a_bad_step_moves_no_bit_and_is_counted(
    make_config, tmp_path, spoil, fault, reason, optimizer
):
    snapshots = spoil({4: fault})
    said = _train(make_config(*SKIP, "steps=6", f"optimizer.kind={optimizer}", "run.log_every=9"))
    before, after, later = snapshots[3], snapshots[4], snapshots[5]
    for name, tensor in before.items():
        if not name.startswith("guard."):
            assert torch.equal(tensor, after[name]), name
    assert all(not torch.equal(after[name], later[name]) for name in ("step", "head.weight"))
    steps = _steps(tmp_path / "run")
    assert [each.skipped for each in steps] == [0, 0, 0, 1, 0, 0]
    assert [each.num_skipped for each in steps] == [0, 0, 0, 1, 1, 1]
    assert f"step 4 is left out: {reason}\n" in said
    assert "SKIPPED 1" in said
    assert int(later["step"]) == 4  # of the optimizer, before step 6


def test_a_batch_that_gives_nan_everywhere_is_left_out(make_config, tmp_path, monkeypatch):
    def accumulate(assembly, batches, **options):
        weight = dict(assembly.parameters)["embedding.weight"].data
        whole = weight.clone()
        if assembly.optimizer.num_steps == 1 and not poisoned:
            poisoned.append(weight[batches[0].tokens_BS[0, 3]].fill_(math.nan))
        accumulate_gradients(assembly, batches, **options)
        weight.copy_(whole)

    poisoned: list[torch.Tensor] = []
    monkeypatch.setattr(loop, "accumulate_gradients", accumulate)
    said = _train(make_config(*SKIP, "steps=4"))
    assert "step 2 is left out: loss not finite, norm not finite\n" in said
    steps = _steps(tmp_path / "run")
    assert [each.skipped for each in steps] == [0, 1, 0, 0]
    assert math.isnan(steps[1].loss)
    assert all(math.isfinite(steps[index].loss) for index in (0, 2, 3))


def test_a_resume_remembers_what_the_guard_saw(make_config, tmp_path, spoil):
    config = make_config(*SKIP, "steps=8", "run.save_every=4")
    straight = spoil({3: _nan_gradient, 6: _loss_spike})
    _train(config)
    resumed = config.run.model_copy(update={"folder": str(tmp_path / "resumed")})
    parts = spoil({2: _loss_spike})  # the sixth of the run
    _train(
        config.model_copy(update={"run": resumed}),
        tmp_path / "run" / "checkpoints" / "step-00000004",
    )
    assert straight is parts
    for name, tensor in straight[7].items():
        assert torch.equal(tensor, parts[11][name]) or tensor.isnan().any(), name
    steps = _steps(tmp_path / "resumed")
    assert [each.num_skipped for each in steps] == [1, 2, 2, 2]
    history = straight[7]["guard.history"]
    assert torch.equal(history, parts[11]["guard.history"])


def test_a_guard_may_come_go_or_change_at_a_resume(make_config, tmp_path):
    without = _train(make_config("steps=2"))
    assert "skipped" not in without
    steps = 2
    for settings in (SKIP, (*SKIP, "guard.window=5"), ("guard.kind=stop",)):
        steps += 1
        _train(make_config(*settings, f"steps={steps}"), tmp_path / "run")
    assert [each.step for each in _steps(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_a_run_that_only_skips_ends(make_config, tmp_path, spoil):
    snapshots = spoil(dict.fromkeys((3, 4, 6, 7, 8), _nan_gradient))
    with pytest.raises(
        NonFiniteError, match="step 8: the last 3 steps were all left out, this one"
    ):
        _train(make_config(*SKIP, "guard.patience=3", "steps=20"))
    assert [each.skipped for each in _steps(tmp_path / "run")] == [0, 0, 1, 1, 0, 1, 1]
    assert torch.equal(snapshots[5]["head.weight"], snapshots[7]["head.weight"])


def test_a_line_says_how_many_steps_were_skipped():
    record = StepRecord(
        step=3,
        loss=1.0,
        balance_loss=1.0,
        auxiliary_loss=0.0,
        z_loss=0.0,
        grad_norm=1.0,
        learning_rate=1e-3,
        tokens=10,
        seconds=1.0,
        tokens_per_second=10.0,
        num_skipped=2,
    )
    assert log_line(record, 9).endswith("tok/s  skipped 2")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["guard.limit=3"], "guard.limit: no such key for kind = 'stop'"),
        (["guard.kind=skip", "guard.window=8"], r"least_history \(32\) must be at most window \(8"),
        (["guard.kind=skip", "guard.limit=0"], "guard.limit = 0: input should be greater than 0"),
    ],
)
def test_a_wrong_guard_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(nano(), settings)
