"""Runs in this process: resume, stop, evaluation, what a checkpoint holds."""

import io
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from olmo_trainer import checkpoint as checkpoint_module
from olmo_trainer import cli, loop, run_folder, stop_requests
from olmo_trainer.build import assemble
from olmo_trainer.checkpoint import SaveError, load_checkpoint, state_of
from olmo_trainer.checkpoint_manifest import (
    CheckpointError,
    discard_leftovers,
    find_checkpoint,
    read_manifest,
)
from olmo_trainer.checkpoint_storage import TensorReader, TensorWriter
from olmo_trainer.learning_rate import learning_rate
from olmo_trainer.mesh import create_mesh
from olmo_trainer.metrics import HeldoutRecord, StepRecord, read_metrics
from olmo_trainer.open_data import open_data
from olmo_trainer.sample import continue_text, load_model
from olmo_trainer.step import NonFiniteError, accumulate_gradients
from rich.console import Console
from torch.distributed.checkpoint.api import CheckpointException

CPU = torch.device("cpu")
# The tests read checkpoints with torch alone, which warns that it is alone.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _console() -> Console:
    return Console(file=io.StringIO(), width=200)


def _train(config, resume: Path | None = None):
    manifest = None if resume is None else read_manifest(find_checkpoint(resume))
    return loop.train(config, resume=manifest, console=_console())


def _state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    reader = TensorReader(checkpoint)
    metadata = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.full(
            each.size,
            math.nan if each.properties.dtype.is_floating_point else -1,
            dtype=each.properties.dtype,
        )
        for name, each in metadata.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def _steps(folder: Path) -> list[StepRecord]:
    records = read_metrics(folder / "metrics.jsonl")
    return [each for each in records if isinstance(each, StepRecord)]


def _timeless(record: StepRecord) -> StepRecord:
    return replace(
        record, seconds=0.0, tokens_per_second=0.0, phase_seconds={}, flops_per_second=None
    )


def test_stop_and_resume_is_bitwise_the_uninterrupted_run(make_config, tmp_path):
    # An epoch is about 20 steps, so 24 cross its end; two resumes; accumulation.
    size = ("batch.sequences=24", "batch.accumulation=3")
    epoch = len(open_data(make_config(*size)).train) / 24
    assert epoch < 24
    straight = _train(make_config(*size, "steps=24", run="straight"))
    parts = make_config(*size, "steps=24", "run.save_every=8", run="parts")
    whole = _train(parts)
    assert straight is not None
    assert whole is not None
    for step in (8, 16):
        start = tmp_path / "parts" / "checkpoints" / f"step-{step:08d}"
        folder = tmp_path / f"from-{step}"
        resumed = _train(
            parts.model_copy(update={"run": parts.run.model_copy(update={"folder": str(folder)})}),
            start,
        )
        assert resumed is not None
        expected, found = _state(straight.checkpoint), _state(resumed.checkpoint)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor, found[name]), name
        assert [_timeless(each) for each in _steps(folder)] == [
            _timeless(each) for each in _steps(tmp_path / "straight")[step:]
        ]


def test_resuming_in_the_same_folder_makes_one_true_history(make_config, tmp_path):
    config = make_config("steps=6", "run.save_every=2")
    _train(config)
    before = [_timeless(each) for each in _steps(tmp_path / "run")]
    for folder in sorted((tmp_path / "run" / "checkpoints").iterdir())[1:]:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    _train(config, tmp_path / "run")
    assert [_timeless(each) for each in _steps(tmp_path / "run")] == before


def test_a_finished_run_does_nothing_and_keeps_its_checkpoint(make_config, tmp_path):
    config = make_config("steps=2")
    outcome = _train(config)
    assert outcome is not None
    before = {file: file.stat().st_mtime_ns for file in outcome.checkpoint.iterdir()}
    assert _train(config, tmp_path / "run") is None
    assert {file: file.stat().st_mtime_ns for file in outcome.checkpoint.iterdir()} == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_request_saves_after_the_step_in_hand(make_config, tmp_path, monkeypatch, number):
    seen = []
    original = loop.update

    def interrupt(assembly, step, rate):
        seen.append(step)
        if step == 3:
            os.kill(os.getpid(), number)
        return original(assembly, step, rate)

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(loop, "update", interrupt)
    outcome = _train(make_config("steps=9"))
    assert outcome is not None
    assert not outcome.finished
    # The request is agreed on in the next step's reduction.
    assert outcome.step == 4
    assert read_manifest(outcome.checkpoint).step == 4
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_signals_close_together_are_one_and_a_later_one_aborts(monkeypatch, capfd):
    with stop_requests.stop_requests() as event:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert event.is_set()
        assert capfd.readouterr().err.count("stopping after this step") == 1
        monkeypatch.setattr(stop_requests, "SAME_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_evaluation_leaves_training_bitwise_alone(make_config, tmp_path):
    _train(make_config("steps=4", run="without"))
    _train(make_config("steps=4", "run.heldout_every=1", run="with"))
    without, with_ = (_steps(tmp_path / name) for name in ("without", "with"))
    strip = [replace(_timeless(each), heldout_loss=None) for each in with_]
    assert strip == [replace(_timeless(each), heldout_loss=None) for each in without]
    evaluations = [
        each
        for each in read_metrics(tmp_path / "with" / "metrics.jsonl")
        if isinstance(each, HeldoutRecord)
    ]
    assert [each.step for each in evaluations] == [0, 1, 2, 3, 4]


def test_training_learns(make_config, tmp_path):
    _train(make_config("steps=40", "optimizer.learning_rate=0.01"))
    losses = [each.loss for each in _steps(tmp_path / "run")]
    assert losses[0] == pytest.approx(math.log(257), abs=0.5)
    assert losses[-1] < 2.6


def test_a_nan_stops_the_run_before_anything_is_changed(make_config, tmp_path, monkeypatch):
    seen = {}

    def poison(assembly, batches, **options):
        accumulate_gradients(assembly, batches, **options)
        if assembly.optimizer.num_steps == 2:
            _, parameter = assembly.parameters[3]
            parameter.main_grad.view(-1)[0] = math.nan
            seen.update({n: t.local.clone() for n, t in state_of(assembly).items() if n != "step"})
            seen["assembly"] = assembly

    monkeypatch.setattr(loop, "accumulate_gradients", poison)
    with pytest.raises(NonFiniteError, match="step 3: the gradient norm is nan; nothing was"):
        _train(make_config("steps=5"))
    assembly = seen.pop("assembly")
    for name, tensor in seen.items():
        assert torch.equal(tensor, state_of(assembly)[name].local), name
    assert assembly.optimizer.num_steps == 2


def test_weights_load_whole_and_sample_repeatably(make_config):
    outcome = _train(make_config("steps=3"))
    assert outcome is not None
    manifest = read_manifest(outcome.checkpoint)
    model = load_model(manifest)
    state = _state(outcome.checkpoint)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.flatten(), state[f"main.{name}"]), name
    for layer in manifest.config.model.moe_layers:
        live = model.layers[str(layer)].feed_forward.router.selection_bias.bias_E
        assert torch.equal(live, state[f"selection_bias.{layer}"])
        assert live.dtype == torch.float32
        assert live.abs().max() > 0
    first = continue_text(model, "ab", 20, context=32, seed=1)
    assert first == continue_text(model, "ab", 20, context=32, seed=1)
    greedy = continue_text(model, "ab", 6, context=32, temperature=0)
    assert greedy == continue_text(model, "ab", 6, context=32, temperature=0, seed=9)


def test_the_file_holds_each_element_once(make_config):
    outcome = _train(make_config("steps=1"))
    assert outcome is not None
    manifest = read_manifest(outcome.checkpoint)
    needed = sum(4 * count for count in manifest.elements.values())
    written = sum(size for name, size in manifest.files.items() if name.endswith(".safetensors"))
    assert needed <= written < 1.5 * needed + 100_000


def _edited(config, edit):
    """Save a checkpoint whose tensors `edit` changed; return it as a manifest and an assembly."""
    outcome = _train(config)
    assert outcome is not None
    state = _state(outcome.checkpoint)
    edit(state)
    for file in (*outcome.checkpoint.glob("*.safetensors"), outcome.checkpoint / "tensors.json"):
        file.unlink()
    dcp.save(state, storage_writer=TensorWriter(outcome.checkpoint), no_dist=True)
    manifest = read_manifest_unsized(outcome.checkpoint)
    elements = {name: tensor.numel() for name, tensor in state.items()}
    return replace(manifest, elements=elements), assemble(config, create_mesh(config.layout, CPU))


def read_manifest_unsized(path: Path):
    import json

    from olmo_trainer.checkpoint_manifest import MANIFEST

    raw = json.loads((path / MANIFEST).read_text())
    raw["files"] = {}
    (path / MANIFEST).write_text(json.dumps(raw))
    return read_manifest(path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda state: state.pop("exp_avg.head.weight"), r"exp_avg.head.weight has none there"),
        (lambda state: state.pop("selection_bias.1"), "selection_bias.1 has none there"),
        (
            lambda state: state.update({"main.layers.9.extra": torch.zeros(3)}),
            "main.layers.9.extra has 3 elements there and none here",
        ),
        (
            lambda state: state.update({"main.head.weight": torch.zeros(5)}),
            "main.head.weight has 5 elements there and 8224 elements here",
        ),
    ],
)
def test_a_missing_or_extra_tensor_is_named(make_config, edit, message):
    manifest, assembly = _edited(make_config("steps=1"), edit)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(assembly, manifest)


def test_loading_leaves_nothing_as_it_was_made(make_config):
    config = make_config("steps=2")
    outcome = _train(config)
    assert outcome is not None
    fresh = assemble(config, create_mesh(config.layout, CPU))
    before = {name: each.local.clone() for name, each in state_of(fresh).items() if name != "step"}
    parameters = {name: each.detach().clone() for name, each in fresh.parameters}
    load_checkpoint(fresh, read_manifest(outcome.checkpoint))
    for name, each in state_of(fresh).items():
        if name != "step":
            assert not torch.equal(each.local, before[name]), name
    for name, each in fresh.parameters:
        assert not torch.equal(each, parameters[name]), name
    assert fresh.optimizer.num_steps == 2


def test_bf16_parameters_keep_fp32_state(make_config):
    config = make_config("steps=3", "precision.parameters=bf16")
    outcome = _train(config)
    assert outcome is not None
    state = _state(outcome.checkpoint)
    assert {each.dtype for name, each in state.items() if name != "step"} == {torch.float32}
    master = state["main.head.weight"]
    assert not torch.equal(master, master.bfloat16().float())
    assembly = assemble(config, create_mesh(config.layout, CPU))
    load_checkpoint(assembly, read_manifest(outcome.checkpoint))
    for name, parameter in assembly.parameters:
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.flatten(), state[f"main.{name}"].bfloat16()), name


def test_a_killed_save_is_cleaned_up_and_can_be_redone(make_config, tmp_path):
    config = make_config("steps=2", "run.save_every=1")
    partial = tmp_path / "run" / "checkpoints" / "step-00000001.partial"
    partial.mkdir(parents=True)
    (partial / "tensors-00000.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        find_checkpoint(tmp_path / "run")
    outcome = _train(config)
    assert outcome is not None
    assert not partial.exists()
    assert find_checkpoint(tmp_path / "run").name == "step-00000002"


def test_learning_rate_and_resume_do_not_touch_each_other(make_config, tmp_path):
    config = make_config("steps=8", "schedule.warmup_steps=3", "run.save_every=3")
    _train(config)
    straight = [each.learning_rate for each in _steps(tmp_path / "run")]
    assert straight == [learning_rate(config, step) for step in range(8)]
    resumed = make_config("steps=8", "schedule.warmup_steps=3", run="resumed")
    _train(resumed, tmp_path / "run" / "checkpoints" / "step-00000003")
    assert [each.learning_rate for each in _steps(tmp_path / "resumed")] == straight[3:]
    # A changed peak takes effect at once.
    doubled = make_config(
        "steps=8", "schedule.warmup_steps=3", "optimizer.learning_rate=0.006", run="doubled"
    )
    _train(doubled, tmp_path / "run" / "checkpoints" / "step-00000003")
    rates = [each.learning_rate for each in _steps(tmp_path / "doubled")]
    assert rates == pytest.approx([2 * rate for rate in straight[3:]])


def test_a_used_folder_is_not_overwritten(make_config, tmp_path):
    config = make_config("steps=1")
    _train(config)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"run.folder = .* already holds a run; continue it with"):
        _train(config)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


class _KilledError(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "the same step again"])
@pytest.mark.parametrize("point", range(6))
def test_a_kill_at_any_point_of_a_save_loses_nothing_saved(
    make_config, tmp_path, monkeypatch, point, again
):
    config = make_config("steps=3")
    assembly = assemble(config, create_mesh(config.layout, CPU))
    run = tmp_path / "run"

    def save(step: int) -> Path:
        return checkpoint_module.save_checkpoint(
            assembly, run, step, data_fingerprint="", versions={}
        )

    first, second = save(1), save(2)
    with monkeypatch.context() as patch:
        calls = 0

        def fragile(function):
            def call(*arguments, **options):
                nonlocal calls
                calls += 1
                if calls > point:
                    raise _KilledError
                return function(*arguments, **options)

            return call

        patch.setattr(checkpoint_module.dcp, "save", fragile(dcp.save))
        for name in ("write_manifest", "_make_durable", "_sync"):
            patch.setattr(checkpoint_module, name, fragile(getattr(checkpoint_module, name)))
        patch.setattr(Path, "rename", fragile(Path.rename))
        # torch wraps what happens inside its own save.
        with pytest.raises((_KilledError, CheckpointException, SaveError)):
            save(2 if again else 3)
    discard_leftovers(run)
    newest = find_checkpoint(run)
    assert newest >= second
    for whole in {first, second, newest}:
        load_checkpoint(assembly, read_manifest(whole))
    assert not [each for each in (run / "checkpoints").iterdir() if each.suffix]
    assert find_checkpoint(run) == newest
    third = save(3)
    assert find_checkpoint(run) == third


def test_a_diverged_run_is_not_saved(make_config, tmp_path):
    with pytest.raises(NonFiniteError, match="step 1: the held-out loss is nan; nothing was saved"):
        _train(make_config("steps=1", "optimizer.learning_rate=1e30"))
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        find_checkpoint(tmp_path / "run")


def test_a_moved_run_goes_on_where_it_is(make_config, tmp_path, monkeypatch):
    _train(make_config("steps=2"))
    (tmp_path / "run").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    for path in (tmp_path / "moved", Path(), Path("checkpoints/step-00000002")):
        steps = 1 + read_manifest(find_checkpoint(tmp_path / "moved")).step
        newest = (
            path if "checkpoints" not in str(path) else Path(f"checkpoints/step-{steps - 1:08d}")
        )
        assert cli.main(["--resume", str(newest), "--steps", str(steps)]) == 0
        assert [each.step for each in _steps(tmp_path / "moved")] == list(range(1, steps + 1))
    assert not (tmp_path / "run").exists()


def test_another_run_is_never_overwritten_by_a_resume(make_config, tmp_path):
    _train(make_config("steps=2", run="a"))
    _train(make_config("steps=4", run="b"))
    before = (tmp_path / "b" / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="already holds a run"):
        _train(make_config("steps=4", run="b"), tmp_path / "a")
    assert (tmp_path / "b" / "metrics.jsonl").read_bytes() == before


def test_an_older_checkpoint_does_not_hide_newer_ones(make_config, tmp_path):
    config = make_config("steps=4", "run.save_every=2")
    _train(config)
    older = tmp_path / "run" / "checkpoints" / "step-00000002"
    longer = make_config("steps=5", run="run")
    with pytest.raises(ValueError, match="later checkpoints than step 2, up to step 4"):
        _train(longer, older)
    branch = _train(make_config("steps=3", run="branch"), older)
    assert branch is not None
    assert branch.step == 3


def test_runs_of_one_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len({run_folder.claim_folder("toy") for _ in range(5)}) == 5


def test_a_folder_that_cannot_be_made_is_named(make_config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run.folder = .*file/run'?: cannot write there"):
        _train(make_config("steps=1", run="file/run"))


def test_a_damaged_checkpoint_is_named(make_config):
    outcome = _train(make_config("steps=1"))
    assert outcome is not None
    data = next(outcome.checkpoint.glob("*.safetensors"))
    content = bytearray(data.read_bytes())
    content[:2000] = bytes(2000)
    data.write_bytes(content)
    config = make_config("steps=2")
    assembly = assemble(config, create_mesh(config.layout, CPU))
    with pytest.raises(CheckpointError, match=r"damaged: its tensors cannot be read"):
        load_checkpoint(assembly, read_manifest(outcome.checkpoint))


def test_sampling_survives_any_temperature(make_config):
    outcome = _train(make_config("steps=1"))
    assert outcome is not None
    model = load_model(read_manifest(outcome.checkpoint))
    cold = continue_text(model, "ab", 5, context=32, temperature=1e-300)
    assert cold == continue_text(model, "ab", 5, context=32, temperature=0)
