"""A rank that sleeps, stops or lags in a run of two: it is named, and the run ends."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
from forked_program import ForkedProgram
from olmo_trainer.metrics import RanksRecord, read_metrics

PATIENCE = 4.0
RUN = [
    *("nano", "--set", f"run.watchdog_seconds={PATIENCE}", "--set", "run.sample_bytes=0"),
    *("--set", "run.heldout_every=0", "--set", "run.heldout_sequences=4"),
    *("--set", "run.log_every=2", "--set", "batch.sequences=4"),
]
SLEEP = """
import time
from olmo_trainer.data import TrainData
original = TrainData.microbatches
def microbatches(self, step, **options):
    if rank == 1 and {condition}:
        time.sleep({seconds})
    return original(self, step, **options)
TrainData.microbatches = microbatches
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedProgram]:
    with ForkedProgram(tmp_path_factory.mktemp("output")) as program:
        yield program


def _end(program: ForkedProgram, pids: list[int]) -> str:
    deadline = time.monotonic() + 60
    while not all(program.ended(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    ended = [program.ended(pid) for pid in pids]
    for pid, over in zip(pids, ended, strict=True):
        if not over:
            os.kill(pid, signal.SIGKILL)
            program.wait(pid)
    assert all(ended), "a run hangs"
    return "\n".join(program.output(pid) for pid in pids)


@pytest.mark.dist
def test_a_rank_that_sleeps_is_named(program, tmp_path):
    before = SLEEP.format(condition="step == 4", seconds=300)
    arguments = [*RUN, "--steps", "9", "--set", f"run.folder={tmp_path / 'run'}"]
    pids = program.start_ranks(arguments, 2, before=before)
    words = _end(program, pids)
    assert [program.wait(pid) != 0 for pid in pids] == [True, True]
    assert "slow: rank 1 (" in words
    assert "in step 5, data" in words
    assert "microbatches" in words  # the function in which it stands
    assert "waiting for it: 1 of 2 ranks" in words


@pytest.mark.dist
def test_a_rank_that_is_stopped_is_named(program, tmp_path):
    run = tmp_path / "run"
    arguments = [*RUN, "--steps", "100000", "--set", f"run.folder={run}"]
    pids = program.start_ranks(arguments, 2)
    deadline = time.monotonic() + 60
    while " 8/100000" not in program.output(pids[0]) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(pids[1], signal.SIGSTOP)
    words = _end(program, pids[:1])
    os.kill(pids[1], signal.SIGKILL)
    assert program.wait(pids[0]) == 1
    program.wait(pids[1])
    assert "silent: rank 1 (" in words
    assert "silent since" in words


@pytest.mark.dist
def test_a_rank_that_lags_is_named_and_the_run_goes_on(program, tmp_path):
    before = SLEEP.format(condition="True", seconds=1.0)
    arguments = [*RUN, "--steps", "4", "--set", f"run.folder={tmp_path / 'run'}"]
    pids = program.start_ranks(arguments, 2, before=before)
    words = _end(program, pids)
    assert [program.wait(pid) for pid in pids] == [0, 0]
    assert "rank 1 is slow: 1." in words
    records = [
        each
        for each in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if isinstance(each, RanksRecord)
    ]
    assert [each.step for each in records] == [2, 4]
    # The first steps make what later ones find.
    assert records[-1].own_seconds[1] >= 1.0
    assert records[-1].own_seconds[1] > records[-1].own_seconds[0] + 0.4
