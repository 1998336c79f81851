"""A steady step makes the host wait for nothing, and what it reads late is what it was.

Where the host waits for the device (`Mesh.host_waits`) a step is read when the next one is under
way. A CPU is told here that it is such a device, so that the whole road is tested without one; what
torch itself calls a wait is tested on a GPU.
"""

import io
import math
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from olmo_trainer import loop
from olmo_trainer.checkpoint import state_of
from olmo_trainer.checkpoint_manifest import CheckpointError, find_checkpoint
from olmo_trainer.guard import Breaker
from olmo_trainer.mesh import Mesh
from olmo_trainer.metrics import HeldoutRecord, RanksRecord, StepRecord, read_metrics
from olmo_trainer.step import NonFiniteError, accumulate_gradients
from rich.console import Console
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    # Of what compiles, FlexAttention among it.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

# No step but the last one has another reason to read.
STEADY = ("run.log_every=100", "run.heldout_every=0", "run.save_every=0")
CHOICES = [
    (),
    ("guard.kind=skip", "optimizer.kind=muon"),
    ("batch.accumulation=2", "recompute.kind=blocks", "loss.z_loss=1e-4"),
    ("data.attend=document", "model.attention.window=8", "recompute.kind=experts"),
    ("layout.schedule.kind=zero_bubble_h1", "precision.mxfp8=experts,shared"),
]
ON_A_GPU = [
    *CHOICES,
    ("precision.saved=mxfp8",),
    ("compile.kind=dense", "loss.z_loss=1e-4"),
    ("data.sequence_length=512",),  # from 3072 tokens on, torch sorts for the embedding's gradient
]


@pytest.fixture(autouse=True)
def _no_report(monkeypatch):
    monkeypatch.setattr(loop._Run, "_conclude", lambda self, heldout, saved: saved)


@pytest.fixture
def late(monkeypatch):
    """Make a CPU a device that the host waits for."""
    monkeypatch.setattr(Mesh, "host_waits", True)


def _train(config) -> tuple[loop.Outcome | None, str]:
    said = io.StringIO()
    return loop.train(config, resume=None, console=Console(file=said, width=200)), said.getvalue()


def _records(folder: Path) -> list[object]:
    """Return what a run wrote down, without what a clock says and what a header holds."""
    bare = {"seconds": 0.0, "tokens_per_second": 0.0, "phase_seconds": {}, "flops_per_second": None}
    found: list[object] = []
    for each in read_metrics(folder / "metrics.jsonl"):
        if isinstance(each, StepRecord):
            found.append(replace(each, **bare))
        elif isinstance(each, HeldoutRecord):
            found.append(replace(each, seconds=0.0))
        elif isinstance(each, RanksRecord):
            found.append(("ranks", each.step))
    return found


@pytest.mark.parametrize(
    "settings",
    [
        STEADY,
        ("run.log_every=3", "run.heldout_every=2", "run.save_every=4"),
        (*STEADY, "guard.kind=skip", "guard.window=4", "guard.least_history=2", "guard.limit=1"),
    ],
    ids=" ".join,
)
def test_the_record_is_the_same_however_late_it_is_read(
    make_config, tmp_path, monkeypatch, settings
):
    prompt = _train(make_config("steps=7", *settings, run="prompt"))
    monkeypatch.setattr(Mesh, "host_waits", True)
    late = _train(make_config("steps=7", *settings, run="late"))
    assert _records(tmp_path / "late") == _records(tmp_path / "prompt")
    for each in (prompt, late):
        assert each[0] is not None
    assert [line.split("tok/s")[1:] for line in late[1].splitlines()] == [
        line.split("tok/s")[1:] for line in prompt[1].splitlines()
    ]
    skipped = [each.num_skipped for each in _records(tmp_path / "late") if hasattr(each, "skipped")]
    assert (skipped[-1] > 0) == ("guard.kind=skip" in settings)


def test_a_step_is_written_when_the_next_one_is_under_way(make_config, tmp_path, monkeypatch, late):
    written, original = [], loop.update

    def update(assembly, step, rate):
        records = _records(tmp_path / "run")
        written.append([each.step for each in records if isinstance(each, StepRecord)])
        return original(assembly, step, rate)

    monkeypatch.setattr(loop, "update", update)
    _train(make_config("steps=6", "run.log_every=100", "run.save_every=3"))
    # Before the save after step 3 all of its records are there.
    assert written == [[], [], [1], [1, 2, 3], [1, 2, 3], [1, 2, 3, 4]]


def test_a_nan_moves_nothing_though_another_step_is_launched(
    make_config, tmp_path, monkeypatch, late
):
    seen, launched = {}, []

    def poison(assembly, batches, **options):
        accumulate_gradients(assembly, batches, **options)
        launched.append(assembly)
        if len(launched) == 3:
            _, parameter = assembly.parameters[3]
            parameter.main_grad.view(-1)[0] = math.nan
            state = state_of(assembly)
            seen.update({n: getattr(t, "local", t).clone() for n, t in state.items()})

    monkeypatch.setattr(loop, "accumulate_gradients", poison)
    with pytest.raises(NonFiniteError, match="step 3: the gradient norm is nan; nothing was"):
        _train(make_config("steps=9", *STEADY))
    assert len(launched) == 4
    state = state_of(launched[0])
    for name, tensor in seen.items():
        assert torch.equal(tensor, getattr(state[name], "local", state[name])), name
    assert [each.step for each in _records(tmp_path / "run") if isinstance(each, StepRecord)] == [
        *(1, 2)
    ]


def test_a_nan_is_heard_before_anything_is_saved(make_config, tmp_path, monkeypatch, late):
    def poison(assembly, batches, **options):
        accumulate_gradients(assembly, batches, **options)
        _, parameter = assembly.parameters[3]
        parameter.main_grad.view(-1)[0] = math.nan

    monkeypatch.setattr(loop, "accumulate_gradients", poison)
    with pytest.raises(NonFiniteError, match="step 1: the gradient norm is nan"):
        _train(make_config("steps=9", "run.save_every=1"))
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        find_checkpoint(tmp_path / "run")


def test_what_was_held_back_once_is_held_back():
    breaker = Breaker()
    norms = [1.0, math.inf, 1.0, math.nan, 2.0]
    assert [bool(breaker.check(torch.tensor(norm))) for norm in norms] == [False, *4 * [True]]


def test_a_stop_is_heard_a_step_later_and_saves_what_is_written(
    make_config, tmp_path, monkeypatch, late
):
    original = loop.update

    def update(assembly, step, rate):
        if step == 3:
            (tmp_path / "run" / "stop").touch()
        return original(assembly, step, rate)

    monkeypatch.setattr(loop, "update", update)
    outcome, said = _train(make_config("steps=9", *STEADY))
    assert outcome is not None
    # Asked in the reduction of step 4, which is read while step 5 is under way.
    assert (outcome.step, outcome.finished, outcome.checkpoint.name) == (5, False, "step-00000005")
    assert "stopped after step 5, as asked" in said
    steps = [each.step for each in _records(tmp_path / "run") if isinstance(each, StepRecord)]
    assert steps == [1, 2, 3, 4, 5]


_TORCH = os.path.dirname(torch.__file__) + os.sep
_READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
_COPIES = {"tensor", "as_tensor", "asarray"}  # from memory that is not pinned
_WAITS = {
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::item",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::repeat_interleave",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
}
# What the packages look at where it costs nothing, on a CPU alone; each says so itself, and has
# tests of its own that nothing of it is left on a GPU.
_ON_A_CPU = {
    ("olmo_routing/_checks.py", "check_expert_ids"),
    ("olmo_routing/_balance_report.py", "_check_kept_values"),
    ("olmo_ep_comm/_local.py", "dispatch"),
    ("olmo_experts_gemm/_checks.py", "check_offsets"),
    ("olmo_mxfp8/_groups.py", "read_offsets"),
}


def _place() -> tuple[str, str]:
    """Return the file and function of ours that called torch."""
    for frame in reversed(traceback.extract_stack()):
        passes_on = frame.filename.startswith(_TORCH) or frame.filename == __file__
        # Where a backward is split, its mode stands between every call and torch.
        passes_on |= frame.filename.endswith("olmo_pipeline/_split_backward.py")
        if not passes_on and not frame.name.startswith("<"):
            return "/".join(Path(frame.filename).parts[-2:]), frame.name
    raise AssertionError("something outside of torch has called it")


class _Calls(TorchFunctionMode):
    def __init__(self, found: set[tuple[str, str]]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in _READS or (name in _COPIES and not hasattr(torch.Tensor, name)):
            self.found.add(_place())
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, found: set[tuple[str, str]]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        picks = name.startswith("aten::index") and name != "aten::index_select"
        indices = args[1] if picks and isinstance(args[1], (list, tuple)) else ()
        by_mask = any(each is not None and each.dtype == torch.bool for each in indices)
        if name in _WAITS or by_mask:
            self.found.add(_place())
        return func(*args, **(kwargs or {}))


@contextmanager
def _noting_reads(found: set[tuple[str, str]]) -> Iterator[None]:
    with _Operations(found), _Calls(found):
        yield


def _watch_steady_steps(monkeypatch, watching: Callable[[], object]) -> list[int]:
    """Launch and read every step but the first two and the last within `watching()`."""
    watched: list[int] = []
    launch, read_steps = loop._Run._launch, loop._Run._read_steps

    def is_steady(run, step) -> bool:
        return 2 < step < run.config.steps

    def watched_launch(run, step, stop):
        if not is_steady(run, step):
            return launch(run, step, stop)
        watched.append(step)
        with watching():
            return launch(run, step, stop)

    def watched_read(run, step, progress):
        if not is_steady(run, step):
            return read_steps(run, step, progress)
        with watching():
            return read_steps(run, step, progress)

    monkeypatch.setattr(loop._Run, "_launch", watched_launch)
    monkeypatch.setattr(loop._Run, "_read_steps", watched_read)
    return watched


def _launch_only(monkeypatch, watching: Callable[[], object]) -> list[int]:
    """As `_watch_steady_steps`, but for the read: on a CPU nothing tells it from one that waits."""
    read_steps = loop._Run._read_steps
    watched = _watch_steady_steps(monkeypatch, watching)
    monkeypatch.setattr(loop._Run, "_read_steps", read_steps)
    return watched


@pytest.mark.parametrize("settings", CHOICES, ids=" ".join)
def test_a_steady_step_reads_nothing(make_config, monkeypatch, late, settings):
    found: set[tuple[str, str]] = set()
    watched = _launch_only(monkeypatch, lambda: _noting_reads(found))
    _train(make_config("steps=4", *STEADY, *settings))
    assert watched == [3]
    assert found  # the checks of the packages: what looks for reads finds them
    assert found <= _ON_A_CPU


@pytest.mark.parametrize(
    "wait",
    [
        float,
        lambda x: bool(x > 0),
        lambda x: x.tolist(),
        lambda x: x[None].nonzero(),
        lambda x: x[None][x[None] > 0],
        lambda x: torch.tensor([1.0, 2.0]),
    ],
    ids=["float", "bool", "tolist", "nonzero", "mask", "copy"],
)
def test_a_read_in_a_steady_step_is_found(make_config, monkeypatch, late, wait):
    original = loop.update

    def update(assembly, step, rate):
        updated = original(assembly, step, rate)
        wait_for(updated.norm)
        return updated

    # A line of the program's own, as far as a stack can tell.
    scope: dict[str, object] = {"wait": wait}
    code = "def wait_for(x):\n    wait(x)\n"
    exec(compile(code, "olmo_trainer/step.py", "exec"), scope)
    wait_for = scope["wait_for"]
    assert callable(wait_for)
    monkeypatch.setattr(loop, "update", update)
    found: set[tuple[str, str]] = set()
    _launch_only(monkeypatch, lambda: _noting_reads(found))
    _train(make_config("steps=4", *STEADY))
    assert found - _ON_A_CPU == {("olmo_trainer/step.py", "wait_for")}


@contextmanager
def _refusing_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("settings", ON_A_GPU, ids=" ".join)
def test_a_steady_step_on_a_gpu_waits_for_nothing(make_config, monkeypatch, tmp_path, settings):
    watched = _watch_steady_steps(monkeypatch, _refusing_waits)
    _train(make_config("steps=7", "device=cuda", *STEADY, *settings))
    assert watched == [3, 4, 5, 6]
    steps = [each for each in _records(tmp_path / "run") if isinstance(each, StepRecord)]
    assert [each.step for each in steps] == list(range(1, 8))
    assert all(math.isfinite(each.loss) for each in steps)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_wait_in_a_steady_step_on_a_gpu_is_found(make_config, monkeypatch):
    original = loop.update

    def update(assembly, step, rate):
        updated = original(assembly, step, rate)
        float(updated.norm)
        return updated

    monkeypatch.setattr(loop, "update", update)
    _watch_steady_steps(monkeypatch, _refusing_waits)
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        _train(make_config("steps=7", "device=cuda", *STEADY))
