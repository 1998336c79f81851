"""The program on GPUs: BF16 by itself on one, every layout over NCCL with two ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_ranks import launch
from olmo_trainer.metrics import StepRecord, read_metrics
from steady_program import STEADY

ROOT = Path(__file__).parents[1]
REPLICAS = [
    "optimizer.replicas.collective=reduce_scatter",
    "optimizer.replicas.reduce=in_backward",
    "optimizer.replicas.gather=in_forward",
]
LAYOUTS = {
    "data": [],
    "data, overlapped": REPLICAS,
    "expert": ["layout.expert=2"],
    "context": ["layout.context=2", "layout.expert=2"],
    "pipeline": ["layout.pipeline=2", "batch.accumulation=4"],
    "interleaved": [
        "layout.pipeline=2",
        "batch.accumulation=4",
        "layout.schedule.kind=interleaved",
    ],
    "zero bubble": [
        "layout.pipeline=2",
        "batch.accumulation=4",
        "layout.schedule.kind=zero_bubble_v",
    ],
    "rowwise": ["layout.expert=2", "layout.dispatcher.kind=rowwise"],
    "rowwise, overlapped": [
        *("layout.expert=2", "layout.dispatcher.kind=rowwise", "batch.accumulation=2"),
        *REPLICAS,
    ],
    "recompute": ["layout.expert=2", "recompute.kind=blocks"],
}


# Those whose dispatcher needs nothing on the host.
STEADY_LAYOUTS = {
    **{name: LAYOUTS[name] for name in ("data", "pipeline", "interleaved", "rowwise")},
    "data, overlapped": REPLICAS,
    "context": [*LAYOUTS["context"], "layout.dispatcher.kind=rowwise"],
    "zero bubble, compiled": [*LAYOUTS["zero bubble"], "compile.kind=dense"],
}


def _train(folder: Path, *settings: str, processes: int = 1) -> list[float]:
    _run(ROOT / "apps" / "trainer", folder, *settings, processes=processes)
    records = read_metrics(folder / "metrics.jsonl")
    return [each.loss for each in records if isinstance(each, StepRecord)]


def _run(program: Path, folder: Path, *settings: str, processes: int = 1) -> str:
    arguments = ["nano"]
    for setting in (*settings, f"run.folder={folder}", "run.sample_bytes=0"):
        arguments += ["--set", setting]
    if processes > 1:
        return launch(program, *arguments, world=processes)
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_gpu_trains_in_bf16_as_in_fp32(tmp_path):
    bf16 = _train(tmp_path / "bf16")
    fp32 = _train(tmp_path / "fp32", "precision.parameters=fp32")
    assert bf16 == pytest.approx(fp32, rel=2e-2)
    assert bf16 != fp32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_gpu_runs_every_choice_that_needs_no_other(tmp_path):
    plain = _train(tmp_path / "plain")
    recomputed = _train(tmp_path / "recomputed", "recompute.kind=experts")
    assert recomputed == pytest.approx(plain, rel=1e-3)
    settings = ("precision.mxfp8=experts,shared", "recompute.kind=blocks", "guard.kind=skip")
    assert _train(tmp_path / "mxfp8", *settings) == pytest.approx(plain, rel=3e-2)
    packed = _train(tmp_path / "packed", "precision.saved=mxfp8", "batch.accumulation=2")
    assert packed == pytest.approx(plain, rel=2e-2)
    muon = _train(tmp_path / "muon", "optimizer.kind=muon", "optimizer.moments=bf16")
    assert muon[-1] < muon[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Losses of one process in FP32."""
    return _train(tmp_path_factory.mktemp("alone"), "precision.parameters=fp32")


@pytest.mark.multigpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_give_the_losses_of_one(alone, tmp_path, layout):
    together = _train(
        tmp_path / "together", "precision.parameters=fp32", *LAYOUTS[layout], processes=2
    )
    assert together == pytest.approx(alone, rel=2e-4)


@pytest.mark.multigpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_that_drops_is_run_again_with_larger_symmetric_memory(alone, tmp_path):
    settings = [*LAYOUTS["rowwise"], "layout.dispatcher.capacity_factor=1.0", "rerun.kind=drops"]
    settings += ["precision.parameters=fp32"]
    assert _train(tmp_path / "run", *settings, processes=2) == pytest.approx(alone, rel=2e-4)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert sum(each.reruns for each in records if isinstance(each, StepRecord)) > 0


@pytest.mark.multigpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", STEADY_LAYOUTS)
def test_steady_steps_of_two_ranks_wait_for_nothing(tmp_path, layout):
    settings = [*STEADY_LAYOUTS[layout], "run.log_every=100", "run.heldout_every=0", "steps=7"]
    program = Path(__file__).with_name("steady_program.py")
    said = _run(program, tmp_path / "run", *settings, processes=2)
    assert said.count(f"{STEADY} 4") == 2
