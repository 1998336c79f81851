"""Whom the watchdog accuses, and when."""

import threading
import time
from dataclasses import replace

import pytest
from olmo_trainer.metrics import RanksRecord
from olmo_trainer.phases import PHASES
from olmo_trainer.rank_times import slow_rank
from olmo_trainer.watchdog import Sign, Watchdog, accuse
from torch.distributed import HashStore


def _sign(rank: int, **changes) -> Sign:
    made = Sign(rank, 5, 7, "reduce", 61.0, True, "mesh.py:1 in f: g()", f"host{rank}", 100 + rank)
    return replace(made, **changes)


def test_the_rank_that_came_least_far_is_named():
    late = _sign(2, phase="data", waits=False, place="disk.py:3 in read: file.read()")
    culprits, words = accuse([_sign(0), _sign(1), late, _sign(3)], set())
    assert culprits == [2]
    assert "no progress for 61 s" in words
    assert (
        "slow: rank 2 (host2, process 102): in step 7, data, for 61 s, at disk.py:3 in read"
        in words
    )
    assert "waiting for it: 3 of 4 ranks" in words
    assert "rank 1" not in words
    # A step behind is further behind than any phase.
    assert accuse([_sign(0, phase="data"), _sign(1, step=6, phase="step")], set())[0] == [1]


@pytest.mark.parametrize("phase", PHASES)
def test_in_one_phase_who_stands_in_no_collective_is_waited_for(phase):
    signs = [_sign(0, phase=phase), _sign(1, phase=phase, waits=False), _sign(2, phase=phase)]
    assert accuse(signs, set())[0] == [1]


def test_silent_ranks_are_named_before_slow_ones():
    signs = [_sign(0), _sign(1, phase="step"), None, _sign(3, phase="data")]
    culprits, words = accuse(signs, {1, 2})
    assert culprits == [1, 2]
    assert "silent: rank 1 (host1, process 101): in step 7, step" in words
    assert "rank 2 was never heard" in words


def test_a_deadlock_accuses_nobody_and_shows_all():
    culprits, words = accuse([_sign(0), _sign(1)], set())
    assert culprits == []
    assert "every rank stands at the same place: rank 0 (host0" in words
    assert "rank 1 (host1" in words
    # One process alone has nobody to wait for.
    assert accuse([_sign(0, waits=False)], set())[0] == [0]


def _watch(store, rank: int, said: list[str], patience: float = 0.4) -> Watchdog:
    return Watchdog(rank=rank, world=2, store=store, patience=patience, end=said.append)


def test_a_rank_that_stops_beating_is_found_by_both():
    store, heard = HashStore(), ([], [])
    quick, slow = (_watch(store, rank, heard[rank]) for rank in (0, 1))
    stuck, release = threading.Event(), threading.Event()

    def sleepy() -> None:
        with slow:
            slow.beat(1, "data")
            slow.beat(2, "data")
            stuck.set()
            release.wait(20)

    thread = threading.Thread(target=sleepy)
    with quick:
        thread.start()
        quick.beat(1, "data")
        assert stuck.wait(20)
        quick.beat(2, "reduce")
        deadline = time.monotonic() + 20
        while not all(heard) and time.monotonic() < deadline:
            time.sleep(0.02)
    release.set()
    thread.join()
    for messages in heard:
        (message,) = messages
        assert "slow: rank 1" in message
        assert "in step 2, data" in message
        assert "release.wait(20)" in message  # where it stands


def test_beats_and_slow_phases_keep_it_quiet():
    said: list[str] = []
    watchdog = Watchdog(rank=0, world=1, store=None, patience=0.3, end=said.append)
    with watchdog:
        for phase in PHASES:  # the first step may take ten times as long
            watchdog.beat(1, phase)
        time.sleep(0.6)
        for step in range(2, 12):
            watchdog.beat(step, "data")
            time.sleep(0.06)
        watchdog.beat(12, "save")
        time.sleep(0.6)
        assert not said
        watchdog.beat(12, "data")
        deadline = time.monotonic() + 20
        while not said and time.monotonic() < deadline:
            time.sleep(0.02)
        assert "slow: rank 0" in said[0]


def test_zero_seconds_never_end_a_run():
    said: list[str] = []
    with Watchdog(rank=0, world=1, store=None, patience=0.0, end=said.append) as watchdog:
        watchdog.beat(2, "data")
        time.sleep(0.2)
    assert not said


def test_a_rank_that_works_longer_than_the_usual_one_is_named():
    assert slow_rank(RanksRecord(step=1, own_seconds=[0.1, 0.1, 0.25, 0.11])) == (
        "rank 2 is slow: 0.250 s of work a step, 2.5 times the median rank"
    )
    for even in ([0.1], [0.1, 0.14], [0.2, 0.2, 0.2]):
        assert slow_rank(RanksRecord(step=1, own_seconds=even)) is None
