"""Saves and loads in processes of their own: what they hold at most, what a killed one leaves."""

import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from olmo_distopt import ShardedAdamW
from torch import nn
from torch.distributed.checkpoint import CheckpointException

SECONDS = 240

# The peak is VmHWM, not `ru_maxrss`, which starts at the peak of the process that forked.
STREAMED = """if True:
    import re, sys, warnings
    from pathlib import Path
    import torch
    import torch.distributed.checkpoint as dcp
    from olmo_distopt import ReplicaGroups, ShardedAdamW
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    groups = ReplicaGroups({"alone": None}, lambda *_: "alone")

    def make(tensors):
        named = [
            (f"w{i}", torch.nn.Parameter(torch.full((2**18,), float(i), dtype=torch.bfloat16)))
            for i in range(tensors)
        ]
        return ShardedAdamW(named, groups, lr=0.1)

    def kibibytes(what):
        return int(re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

    def risen(call):
        before = kibibytes("VmRSS")
        kept = call()
        return kibibytes("VmHWM") - before

    def load(optimizer, folder):
        dcp.load(optimizer.start_loading(), checkpoint_id=folder)
        optimizer.finish_loading()

    small = make(2)
    dcp.save(small.state_dict(), checkpoint_id=sys.argv[1] + "/small")
    load(small, sys.argv[1] + "/small")
    optimizer = make(32)
    state = optimizer.state_dict()
    held = sum(getattr(v, "local", v).nbytes for v in state.values()) // 1024
    folder = sys.argv[1] + "/large"
    saved = risen(lambda: dcp.save(state, checkpoint_id=folder))
    loaded = risen(lambda: load(optimizer, folder))
    copied = risen(lambda: [getattr(v, "local", v).clone() for v in state.values()])
    print(held, saved, loaded, copied)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_save_and_a_load_hold_no_copy_of_the_state(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", STREAMED, tmp_path],
        check=False,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    held, saved, loaded, copied = map(int, done.stdout.split())
    assert held == 96 * 1024
    assert max(saved, loaded) < held / 12, (saved, loaded)
    assert copied > 0.9 * held, "a copy would be seen"


KILLED = """if True:
    import os, signal, sys, warnings
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from olmo_distopt import FlatShard, ReplicaGroups, ShardedAdamW
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, victim, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{folder}/s", rank=rank, world_size=2)
    named = [(f"w{i}", torch.nn.Parameter(torch.full((8,), 1.0 + i))) for i in range(3)]
    groups = ReplicaGroups({"all": dist.group.WORLD}, lambda *_: "all")
    optimizer = ShardedAdamW(named, groups, lr=0.1, min_shard_numel=1)
    dcp.save(optimizer.state_dict(), checkpoint_id=f"{folder}/whole")
    given = FlatShard.__get_tensor_shard__

    def killed(self, index):
        if rank == victim and index.fqn == "main.w1":
            os.kill(os.getpid(), signal.SIGKILL)
        return given(self, index)

    FlatShard.__get_tensor_shard__ = killed
    dcp.save(optimizer.state_dict(), checkpoint_id=f"{folder}/broken")
    os._exit(7)  # the other one believes that all is saved
"""


def _wait_for_both(ranks, victim):
    """Wait for the killed rank, then for the other, which fails or may wait for the first."""
    ranks[victim].communicate(timeout=SECONDS)
    other = ranks[1 - victim]
    try:
        _, said = other.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        other.kill()
        _, said = other.communicate()
    return other.returncode, said


@pytest.mark.dist
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_within_a_save_leaves_no_checkpoint(alone, tmp_path, victim):
    """Rank 0 writes the metadata, which makes a checkpoint of what lies there."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED, str(rank), str(victim), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        code, said = _wait_for_both(ranks, victim)
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[victim].returncode == -signal.SIGKILL
    assert code not in (0, 7), said
    assert (tmp_path / "broken").exists(), said
    named = [(f"w{i}", nn.Parameter(torch.zeros(8))) for i in range(3)]
    optimizer = ShardedAdamW(named, alone, lr=0.1)
    with pytest.raises(CheckpointException):
        _load(optimizer, tmp_path / "broken")
    with pytest.raises(RuntimeError, match="loaded into part of"):
        optimizer.finish_loading()
    _load(optimizer, tmp_path / "whole")
    optimizer.finish_loading()
    assert [p.detach().tolist() for _, p in named] == [[1.0] * 8, [2.0] * 8, [3.0] * 8]


def _load(optimizer: Any, folder):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(optimizer.start_loading(), checkpoint_id=folder)
