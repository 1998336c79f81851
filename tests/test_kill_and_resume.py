"""A run that is killed again and again is, bit for bit, the run that never was."""

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from forked_program import ForkedProgram
from olmo_trainer.checkpoint_manifest import newest_step
from olmo_trainer.metrics import HeldoutRecord, StepRecord, read_metrics

STEPS = 40
KILLS = 20
ONWARD = [
    *("nano", "--continue", "--steps", str(STEPS)),
    *("--set", "run.save_every=2", "--set", "run.keep_last=2", "--set", "run.keep_every=10"),
    *("--set", "run.heldout_every=10", "--set", "run.heldout_sequences=4"),
    *("--set", "run.sample_bytes=0", "--set", "run.threads=1", "--set", "batch.sequences=4"),
    *("--set", "data.sequence_length=32", "--set", "data.source.kind=text_folder"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedProgram]:
    with ForkedProgram(tmp_path_factory.mktemp("output")) as program:
        yield program


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    words = random.Random(0)
    for index in range(12):  # the run crosses the end of an epoch
        (folder / f"{index}.txt").write_text(" ".join(words.choices(["ab", "cde", "f"], k=120)))
    return folder


def _history(run: Path) -> list[StepRecord | HeldoutRecord]:
    """Return what happened, without when: all numbers but the clock's."""
    history: list[StepRecord | HeldoutRecord] = []
    for record in read_metrics(run / "metrics.jsonl"):
        if isinstance(record, StepRecord):
            history.append(
                replace(
                    record,
                    seconds=0.0,
                    tokens_per_second=0.0,
                    phase_seconds={},
                    flops_per_second=None,
                )
            )
        elif isinstance(record, HeldoutRecord):
            history.append(replace(record, seconds=0.0))
    return history


def _tensors(run: Path, step: int) -> bytes:
    folder = run / "checkpoints" / f"step-{step:08d}"
    return (folder / "tensors-00000.safetensors").read_bytes()


def _kill_in_a_save(run: Path, program: ForkedProgram, pid: int, delay: float) -> None:
    """Kill the run `delay` seconds after a save began."""
    seen = set((run / "checkpoints").glob("*.partial"))
    deadline = time.monotonic() + 60
    while not set((run / "checkpoints").glob("*.partial")) - seen:
        if program.ended(pid) or time.monotonic() > deadline:
            return
        time.sleep(0.0005)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)


def test_twenty_kills_change_nothing(program, texts, tmp_path):
    source = ["--set", f"data.source.path={texts}"]
    straight, run = tmp_path / "straight", tmp_path / "run"
    pid = program.start([*ONWARD, *source, "--set", f"run.folder={straight}"])
    assert program.wait(pid) == 0, program.output(pid)
    began = time.monotonic()
    pid = program.start([*ONWARD, *source, "--set", f"run.folder={tmp_path / 'short'}"])
    while newest_step(tmp_path / "short") < 4 and not program.ended(pid):
        time.sleep(0.01)
    a_few_steps = time.monotonic() - began
    os.kill(pid, signal.SIGKILL)
    program.wait(pid)
    moments = random.Random(20)
    lives: list[list[int]] = [[]]
    killed = 0
    onward = [*ONWARD, *source, "--set", f"run.folder={run}"]
    while killed < KILLS:
        mode = ("background", "blocking")[killed % 4 > 1]
        pid = program.start([*onward, "--set", f"run.save_mode={mode}"])
        if killed % 2:
            _kill_in_a_save(run, program, pid, moments.uniform(0, 0.02))
        else:
            time.sleep(moments.uniform(0.5, 1.5) * a_few_steps)
            if not program.ended(pid):
                os.kill(pid, signal.SIGKILL)
        code = program.wait(pid)
        assert code in (0, -signal.SIGKILL), program.output(pid)
        killed += code != 0
        lives[-1].append(newest_step(run))
        if code == 0 or lives[-1][-1] >= STEPS - 4:  # the machine is quick: live the end again
            for folder in (run / "checkpoints").iterdir():
                if folder.name != "step-00000010":
                    shutil.rmtree(folder)
            lives.append([])
    # Nothing that had its name was lost, and most lives got somewhere.
    assert all(reached == sorted(reached) for reached in lives)
    assert max(map(max, filter(None, lives))) > 4
    pid = program.start(onward)
    assert program.wait(pid) == 0, program.output(pid)
    assert _history(run) == _history(straight)
    for step in (10, 20, 30, STEPS):
        assert _tensors(run, step) == _tensors(straight, step), step
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == [f"step-{step:08d}" for step in (10, 20, 30, STEPS - 2, STEPS)]


@pytest.mark.dist
def test_a_killed_rank_takes_the_run_down_and_other_layouts_go_on(program, texts, tmp_path):
    run, straight = tmp_path / "run", tmp_path / "straight"
    common = [*ONWARD, "--set", f"data.source.path={texts}", "--set", "optimizer.epsilon=1e-3"]
    alone = [*common, "--set", f"run.folder={straight}", "--set", "steps=16"]
    assert program.wait(program.start(alone)) == 0
    onward = [*common, "--set", f"run.folder={run}", "--set", "steps=16"]
    layouts = (
        ("layout.expert=2", "layout.pipeline=1", 2),
        ("layout.expert=1", "layout.pipeline=2", 2),
    )
    reached = 0
    for victim, (expert, pipeline, world) in enumerate(layouts):
        pids = program.start_ranks([*onward, "--set", expert, "--set", pipeline], world)
        deadline = time.monotonic() + 60
        while newest_step(run) < reached + 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(pids[victim], signal.SIGKILL)
        assert program.wait(pids[victim]) == -signal.SIGKILL
        survivor = pids[1 - victim]
        while not program.ended(survivor) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert program.ended(survivor), "a rank waits for one that is gone"
        assert program.wait(survivor) != 0
        assert newest_step(run) >= reached + 4, program.output(survivor)
        reached = newest_step(run)
        assert reached < 16
    assert program.wait(program.start(onward)) == 0

    def losses(folder: Path) -> list[float]:
        return [each.loss for each in _history(folder) if isinstance(each, StepRecord)]

    # Another order of sums: not the last bits, but the same run.
    assert losses(run) == pytest.approx(losses(straight), rel=1e-4)
