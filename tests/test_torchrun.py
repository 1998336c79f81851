"""The program as torchrun starts it: data, context and expert parallel, then one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from olmo_trainer.cli import main
from olmo_trainer.metrics import StepRecord, read_metrics

ROOT = Path(__file__).parents[1]


def _losses(folder: Path) -> list[float]:
    records = read_metrics(folder / "metrics.jsonl")
    return [each.loss for each in records if isinstance(each, StepRecord)]


@pytest.mark.dist
def test_four_processes_train_stop_and_continue_in_one(tmp_path):
    settings = [
        *("--set", "run.sample_bytes=0", "--set", "run.heldout_every=0"),
        *("--set", "run.heldout_sequences=8", "--set", "steps=6", "--set", "run.save_every=3"),
    ]
    layout = ["--set", "layout.context=2", "--set", "layout.expert=4"]
    alone, together, continued = (tmp_path / name for name in ("alone", "together", "continued"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    program = [str(ROOT / "apps" / "trainer"), "nano", *settings, *layout]
    done = subprocess.run(
        [*command, *program, "--set", f"run.folder={together}", "--set", "batch.accumulation=2"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("data 2 x context 2 x expert 4 x pipeline 1") == 1
    assert main(["nano", *settings, "--set", f"run.folder={alone}"]) == 0
    half = together / "checkpoints" / "step-00000003"
    assert main(["nano", *settings, "--resume", str(half), "--set", f"run.folder={continued}"]) == 0
    # Adam turns a last-bit difference of a tiny gradient into a whole step: compare losses.
    assert _losses(together) == pytest.approx(_losses(alone), rel=2e-4)
    assert _losses(continued) == pytest.approx(_losses(alone)[3:], rel=2e-4)
    assert (together / "report.html").read_text().startswith("<!DOCTYPE html>")
