"""What a load fills, names and leaves alone, and a save that is cut off."""

import math
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from olmo_distopt import (
    FlatShard,
    ReplicaGroups,
    ShardedAdamW,
    ShardedMuon,
)
from torch import nn
from torch.distributed.checkpoint import CheckpointException


def _alone(call, *arguments, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return call(*arguments, **options)


def test_what_no_checkpoint_filled_is_named(alone, tmp_path):
    def make(names):
        named = [(name, nn.Parameter(torch.ones(4))) for name in names]
        return named, ShardedAdamW(named, alone, lr=0.1)

    _, small = make(["a"])
    _alone(dcp.save, small.state_dict(), checkpoint_id=tmp_path / "small")
    named, optimizer = make(["a", "b"])
    with pytest.raises(
        CheckpointException, match=r"Missing key in checkpoint state_dict: exp_avg\.b"
    ):
        _alone(dcp.load, optimizer.start_loading(), checkpoint_id=tmp_path / "small")
    with pytest.raises(RuntimeError, match=r"loaded into part of: .*exp_avg\.b, .*main\.b, step"):
        optimizer.finish_loading()
    with pytest.raises(RuntimeError, match=r"`step\(\)` must wait"):
        optimizer.step()

    # A single writer that holds half of a line: torch does not check that it is all there.
    state: dict[str, Any] = make(["a", "b"])[1].state_dict()
    for shard in state.values():
        getattr(shard, "local", shard).fill_(1)
    state["exp_avg.b"] = FlatShard(torch.ones(2), global_numel=4)
    _alone(dcp.save, state, checkpoint_id=tmp_path / "half")
    _alone(dcp.load, optimizer.start_loading(), checkpoint_id=tmp_path / "half")
    with pytest.raises(RuntimeError, match=r"loaded into part of: exp_avg\.b\. Load into"):
        optimizer.finish_loading()
    optimizer.adopt_parameters()
    vars(named[0][1])["main_grad"] = vars(named[1][1])["main_grad"] = torch.ones(4)
    optimizer.step()


def test_finish_loading_follows_start_loading(alone):
    optimizer = ShardedAdamW([("a", nn.Parameter(torch.ones(4)))], alone, lr=0.1)
    with pytest.raises(RuntimeError, match=r"must follow `start_loading\(\)`"):
        optimizer.finish_loading()


def test_state_is_given_out_only_when_it_is_whole(alone):
    weight = nn.Parameter(torch.ones(4))
    optimizer = ShardedAdamW([("a", weight)], alone, lr=0.1)
    before = set(optimizer.state_dict())

    def assert_refused():
        with pytest.raises(RuntimeError, match=r"`state_dict\(\)` must wait for `finish_loading"):
            optimizer.state_dict()

    def assert_whole():
        for value in optimizer.state_dict().values():
            assert not getattr(value, "local", value).isnan().any()

    mapping: dict[str, Any] = optimizer.start_loading()
    assert set(mapping) == before
    assert_refused()
    with pytest.raises(RuntimeError, match="loaded into part of"):
        optimizer.finish_loading()
    assert_refused()  # a refused end is no end
    for value in mapping.values():
        getattr(value, "local", value).fill_(1)
    assert_refused()
    optimizer.finish_loading()
    assert_whole()
    optimizer.start_loading()
    assert_refused()
    optimizer.adopt_parameters()
    assert_whole()


def test_a_load_compares_names_and_numbers_of_elements_but_not_shapes(alone, tmp_path):
    """As `start_loading` says: a checkpoint holds lines."""

    def make(**shapes):
        named = [
            (name, nn.Parameter(torch.arange(float(math.prod(shape))).view(shape)))
            for name, shape in shapes.items()
        ]
        return named, ShardedAdamW(named, alone, lr=0.1)

    _alone(dcp.save, make(w=(4, 2))[1].state_dict(), checkpoint_id=tmp_path)
    for shapes, message in [
        ({"w": (3, 3)}, "Size mismatch"),
        ({"w": (7,)}, "Size mismatch"),
        ({"v": (4, 2)}, r"Missing key in checkpoint state_dict: .*\.v"),
    ]:
        _, other = make(**shapes)
        with pytest.raises(CheckpointException, match=message):
            _alone(dcp.load, other.start_loading(), checkpoint_id=tmp_path)
    [(_, weight)], other = make(w=(2, 4))
    _alone(dcp.load, other.start_loading(), checkpoint_id=tmp_path)
    other.finish_loading()
    assert torch.equal(weight, torch.arange(8.0).view(2, 4))


def _hole(rank, world):
    groups = ReplicaGroups({"all": dist.group.WORLD}, lambda name, _: "all")
    optimizer = ShardedAdamW(
        [("w", nn.Parameter(torch.ones(8)))], groups, lr=0.1, min_shard_numel=1
    )
    state = optimizer.start_loading()
    for key, shard in state.items():
        if (rank, key) != (1, "main.w"):
            getattr(shard, "local", shard).fill_(1)
    with pytest.raises(RuntimeError, match=r"loaded into part of: main\.w\."):
        optimizer.finish_loading()


@pytest.mark.dist
def test_a_hole_on_one_rank_stops_every_replica(processes):
    processes.run(_hole, world=2, timeout=60)


def test_giving_out_the_state_disturbs_and_copies_nothing(alone):
    shapes = {"w": (4, 6), "stack": (2, 3, 4), "norm": (3,)}
    runs = []
    for looks in (False, True):
        named: list[tuple[str, Any]] = [
            (name, nn.Parameter(torch.full(shape, 0.5))) for name, shape in shapes.items()
        ]
        optimizer = ShardedMuon(named, alone, lr=0.1)
        places = set()
        for step in range(4):
            for _, p in named:
                p.main_grad = torch.full_like(p, step + 1.0).cumsum(0)
            optimizer.step()
            if looks:
                state: dict[str, Any] = optimizer.state_dict()
                places.add(tuple(getattr(v, "local", v).data_ptr() for v in state.values()))
        runs.append(
            {k: getattr(v, "local", v).clone() for k, v in optimizer.state_dict().items()}
            | {name: p.detach() for name, p in named}
        )
    assert len(places) == 1, "labels on storage that stays"
    assert all(torch.equal(runs[0][key], value) for key, value in runs[1].items())


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16])
def test_moments_may_change_their_dtype_in_a_load(alone, tmp_path, saved, loaded):
    weight: Any = nn.Parameter(torch.linspace(-1, 1, 12))
    optimizer = ShardedAdamW([("w", weight)], alone, lr=0.1, moment_dtype=saved)
    weight.main_grad = torch.linspace(-2, 3, 12)
    optimizer.step()
    kept: dict[str, Any] = optimizer.state_dict()
    _alone(dcp.save, kept, checkpoint_id=tmp_path)
    other = ShardedAdamW([("w", nn.Parameter(torch.zeros(12)))], alone, lr=0.1, moment_dtype=loaded)
    _alone(dcp.load, other.start_loading(), checkpoint_id=tmp_path)
    other.finish_loading()
    for key, value in other.state_dict().items():
        want = getattr(kept[key], "local", kept[key])
        got = getattr(value, "local", value)
        assert torch.equal(got, want.to(got.dtype)), key


def _groups_of_rates(rank, world, folder):
    """Rates go by name: a load into another order and layout cannot mix them up (rank 1 lacks the
    expert), and a new rate reaches every one of them."""
    shapes = {"dense.w": (2, 4), "norm.weight": (4,), "expert.w": (2, 4)}

    def make(names):
        named: list[tuple[str, Any]] = [
            (name, nn.Parameter(torch.ones(shapes[name]))) for name in names
        ]
        groups = ReplicaGroups(
            {"all": dist.group.WORLD, "own": None},
            lambda name, _: "own" if "expert" in name else "all",
        )
        optimizer = ShardedAdamW(
            named,
            groups,
            lr=0.1,
            weight_decay=0.5,
            min_shard_numel=1,
            lr_scale=lambda name, _: 0.5 if "expert" in name else 1.0,
            decay=lambda name, _: {"dense.w": 1.0, "expert.w": 2.0}.get(name, 0.0),
        )
        return dict(named), optimizer

    def take(named, optimizer, lr):
        optimizer.lr = lr
        for p in named.values():
            p.main_grad = torch.zeros_like(p)
        optimizer.step()
        return {name: p.detach()[..., 0].flatten()[0].item() for name, p in named.items()}

    names = ["dense.w", "norm.weight", *(["expert.w"] if rank == 0 else [])]
    named, optimizer = make(names)
    take(named, optimizer, 0.1)
    dcp.save(optimizer.state_dict(), checkpoint_id=folder)
    want = take(named, optimizer, 0.02)
    again, loaded = make(names[::-1])
    dcp.load(loaded.start_loading(), checkpoint_id=folder)
    loaded.finish_loading()
    assert take(again, loaded, 0.02) == want
    return want


@pytest.mark.dist
def test_rates_of_their_own_survive_a_load(processes, tmp_path):
    first, second = processes.run(_groups_of_rates, tmp_path, world=2)
    dense = (1 - 0.1 * 0.5) * (1 - 0.02 * 0.5)
    assert first == pytest.approx({"dense.w": dense, "norm.weight": 1.0, "expert.w": dense})
    assert second == pytest.approx({"dense.w": dense, "norm.weight": 1.0})


def test_a_save_that_is_killed_leaves_no_checkpoint(alone, tmp_path):
    """The process dies in its second save: the first one loads, the second is none."""
    script = """if True:
        import os, sys, warnings
        import torch
        import torch.distributed.checkpoint as dcp
        from olmo_distopt import FlatShard, ReplicaGroups, ShardedAdamW
        warnings.simplefilter("ignore")
        named = [(f"w{i}", torch.nn.Parameter(torch.full((8,), 1.0 + i))) for i in range(3)]
        groups = ReplicaGroups({"alone": None}, lambda *_: "alone")
        optimizer = ShardedAdamW(named, groups, lr=0.1)
        dcp.save(optimizer.state_dict(), checkpoint_id=sys.argv[1])
        given = FlatShard.__get_tensor_shard__
        def killed(self, index):
            return os._exit(9) if index.fqn == "main.w1" else given(self, index)
        FlatShard.__get_tensor_shard__ = killed
        dcp.save(optimizer.state_dict(), checkpoint_id=sys.argv[2])
    """
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = subprocess.run(
        [sys.executable, "-c", script, whole, broken], check=False, capture_output=True, timeout=120
    )
    assert done.returncode == 9, done.stderr
    named = [(f"w{i}", nn.Parameter(torch.zeros(8))) for i in range(3)]
    optimizer = ShardedAdamW(named, alone, lr=0.1)
    with pytest.raises(CheckpointException):
        _alone(dcp.load, optimizer.start_loading(), checkpoint_id=broken)
    with pytest.raises(RuntimeError, match="loaded into part of"):
        optimizer.finish_loading()
    _alone(dcp.load, optimizer.start_loading(), checkpoint_id=whole)
    optimizer.finish_loading()
    assert [p.detach()[0].item() for _, p in named] == [1.0, 2.0, 3.0]
