"""Ranks that read their steps late read the same steps, and decide alike; on CPUs told so."""

from dataclasses import replace
from pathlib import Path

import pytest
from forked_program import ForkedProgram
from olmo_trainer.checkpoint_manifest import newest_step
from olmo_trainer.metrics import StepRecord, read_metrics

LATE = """
from olmo_trainer import loop
from olmo_trainer.mesh import Mesh
Mesh.host_waits = True
"""
# Rank 1 alone is asked, in the middle of step 3, and is the slower one.
ASKED = f"""{LATE}
import os, signal, time
original = loop.update
def update(assembly, step, rate):
    if assembly.mesh.rank == 1:
        time.sleep(0.2)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
    return original(assembly, step, rate)
loop.update = update
"""
# The last rank's gradient breaks in step 3.
POISONED = f"""{LATE}
original = loop.accumulate_gradients
count = 0
def accumulate_gradients(assembly, batches, **options):
    global count
    original(assembly, batches, **options)
    count += 1
    if count == 3 and assembly.mesh.rank == 1:
        gradient = dict(assembly.parameters)["layers.3.feed_forward.experts.w_down_EDH"].main_grad
        gradient.view(-1)[0] = float("inf")
loop.accumulate_gradients = accumulate_gradients
"""


def _settings(run: Path) -> list[str]:
    words = (
        *("layout.expert=2", "batch.sequences=4", "data.sequence_length=32"),
        *("run.log_every=100", "run.heldout_every=0", "run.save_every=0", "run.sample_bytes=0"),
        *("run.threads=1", "run.heldout_sequences=4", f"run.folder={run}"),
    )
    return [part for word in words for part in ("--set", word)]


def _steps(run: Path) -> list[StepRecord]:
    bare = {"seconds": 0.0, "tokens_per_second": 0.0, "phase_seconds": {}, "flops_per_second": None}
    records = read_metrics(run / "metrics.jsonl")
    return [replace(each, **bare) for each in records if isinstance(each, StepRecord)]


@pytest.mark.dist
def test_two_ranks_that_read_late_are_the_run_that_reads_at_once(tmp_path):
    with ForkedProgram(tmp_path) as program:

        def run(name: str, before: str = "") -> list[int]:
            command = ["nano", "--steps", "6", *_settings(tmp_path / name)]
            ranks = program.start_ranks(command, 2, before=before)
            return [program.wait(rank) for rank in ranks]

        assert run("prompt") == [0, 0]
        assert run("late", LATE) == [0, 0]
        prompt = _steps(tmp_path / "prompt")
        assert len(prompt) == 6
        assert _steps(tmp_path / "late") == prompt

        # Heard in the reduction of step 4, which is read while step 5 is under way.
        assert run("asked", ASKED) == [130, 130]
        assert newest_step(tmp_path / "asked") == 5
        assert _steps(tmp_path / "asked") == prompt[:5]

        assert run("poisoned", POISONED) == [1, 1]
        assert _steps(tmp_path / "poisoned") == prompt[:2]
        assert newest_step(tmp_path / "poisoned") == -1
