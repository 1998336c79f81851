"""Optimizer state saved under one layout and loaded under another, element for element."""

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from olmo_distopt import FlatShard, Location, ReplicaGroups, ShardedAdamW
from olmo_distopt.reference import adamw
from torch import nn
from torch.distributed.checkpoint import CheckpointException

# (data, expert, pipeline): data x pipeline processes; expert divides data.
LAYOUTS = [
    (1, 1, 1),
    (2, 1, 1),
    (4, 1, 1),
    (2, 2, 1),
    (4, 2, 1),
    (4, 4, 1),
    (1, 1, 2),
    (2, 1, 2),
    (2, 2, 2),
]
E, D, H, LAYERS = 4, 3, 5, 2
LR = 0.01
# A failure restarts the worker processes, so the example found is kept and not shrunk.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


def _shapes(layer):
    """Big and tiny tensors side by side; 15 and 2 elements divide by no group, 12 and 60 do."""
    prefix = f"layers.{layer}"
    return {
        f"{prefix}.norm.weight": (2,),
        f"{prefix}.experts.w": (E, H, D),
        f"{prefix}.attention.w": (H, D),
        f"{prefix}.experts.norm": (E, D),
        f"{prefix}.router.w": (E, 2 * D),
    }


def _global_values():
    """Every element of every tensor is unique and exact in FP32."""
    values, first = {}, 0
    for layer in range(LAYERS):
        for name, shape in _shapes(layer).items():
            numel = math.prod(shape)
            values[name] = torch.arange(first, first + numel, dtype=torch.float32).view(shape)
            first += numel
    return values


class _Rank:
    """What one process holds under a layout, its parameters set to `fill(global values)`."""

    def __init__(self, rank, world, layout, fill):
        data, expert, pipeline = layout
        assert data * pipeline == world
        stage, data_rank = divmod(rank, data)
        dense: Any = None
        experts: Any = None
        for s in range(pipeline):
            group = dist.new_group([s * data + d for d in range(data)])
            dense = group if s == stage else dense
            for e in range(expert):
                group = dist.new_group([s * data + d for d in range(e, data, expert)])
                experts = group if (s, e) == (stage, data_rank % expert) else experts
        self.groups = ReplicaGroups(
            {"dense": dense, "expert": experts},
            lambda name, _: "expert" if "experts" in name else "dense",
        )
        held = E // expert
        first = data_rank % expert * held
        self.rows, self.parameters, self.locations = {}, {}, {}
        values = _global_values()
        for layer in range(stage * LAYERS // pipeline, (stage + 1) * LAYERS // pipeline):
            for name, shape in _shapes(layer).items():
                rows = slice(first, first + held) if "experts" in name else slice(None)
                self.rows[name] = rows
                self.parameters[name] = nn.Parameter(fill(values[name])[rows].clone())
                if "experts" in name:
                    self.locations[name] = Location(shape, first)

    def optimizer(self):
        return ShardedAdamW(
            self.parameters.items(),
            self.groups,
            lr=LR,
            min_shard_numel=8,
            bucket_bytes=100,
            locations=self.locations,
        )


def _save(rank, world, layout, folder):
    """Main weights start from the parameters; moments are written through the labels."""
    held = _Rank(rank, world, layout, lambda values: values)
    optimizer = held.optimizer()
    values = _global_values()
    state: dict[str, Any] = optimizer.state_dict()
    for name in held.parameters:
        for key, offset in [("exp_avg", 0.25), ("exp_avg_sq", 0.5)]:
            shard = state[f"{key}.{name}"]
            piece = values[name].view(-1)[shard.start : shard.start + shard.local.numel()]
            shard.local.copy_(piece + offset)
    state["step"].fill_(3)
    state["buffer"] = FlatShard(torch.arange(5))
    dcp.save(state, checkpoint_id=folder)


def _load(rank, world, layout, folder):
    """Load into an optimizer that knew other values, then take a step."""
    held = _Rank(rank, world, layout, lambda values: values * 0 - 7)
    optimizer = held.optimizer()
    buffer = torch.zeros(5, dtype=torch.int64)
    dcp.load({**optimizer.start_loading(), "buffer": FlatShard(buffer)}, checkpoint_id=folder)
    with pytest.raises(RuntimeError, match=r"`step\(\)` must wait"):
        optimizer.step()
    optimizer.finish_loading()
    assert buffer.tolist() == list(range(5))
    loaded = {name: p.detach().clone() for name, p in held.parameters.items()}
    values = _global_values()
    for name, p in held.parameters.items():
        vars(p)["main_grad"] = values[name].cos()[held.rows[name]]
    optimizer.step()
    stepped = {name: p.detach() for name, p in held.parameters.items()}
    return held.rows, loaded, stepped, optimizer.num_steps


@pytest.mark.dist
@settings(max_examples=6, deadline=None, phases=PHASES)
@given(saved=st.sampled_from(LAYOUTS), loaded=st.sampled_from(LAYOUTS))
def test_any_layout_loads_any_other(processes, tmp_path_factory, saved, loaded):
    folder = tmp_path_factory.mktemp("checkpoint")
    values = _global_values()
    processes.run(_save, saved, folder, world=saved[0] * saved[2])
    _assert_holds_global_lines(folder, values)
    seen = set()
    for rows, weights, stepped, num_steps in processes.run(
        _load, loaded, folder, world=loaded[0] * loaded[2]
    ):
        assert num_steps == 4
        for name, weight in weights.items():
            seen.add(name)
            assert torch.equal(weight, values[name][rows[name]]), name
            expected, *_ = adamw(
                *(values[name].double(), values[name].cos().double()),
                *(values[name].double() + 0.25, values[name].double() + 0.5),
                **{"step": 4, "lr": LR, "betas": (0.9, 0.95), "eps": 1e-8},
                weight_decay=0.0 if "norm" in name else 0.1,
            )
            torch.testing.assert_close(
                stepped[name].double(), expected[rows[name]], rtol=1e-6, atol=1e-7
            )
    assert seen == set(values)


def _assert_holds_global_lines(folder, values):
    """Read the checkpoint with plain tensors in one process: each is its whole line, in order."""
    whole = {}
    for name, value in values.items():
        for key in ("main", "exp_avg", "exp_avg_sq"):
            whole[f"{key}.{name}"] = torch.full((value.numel(),), math.nan)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(whole, checkpoint_id=folder)
    for name, value in values.items():
        for key, offset in [("main", 0.0), ("exp_avg", 0.25), ("exp_avg_sq", 0.5)]:
            assert torch.equal(whole[f"{key}.{name}"], value.view(-1) + offset), f"{key}.{name}"
    stored = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    payload = sum(3 * 4 * value.numel() for value in values.values()) + 8 + 5 * 8
    pieces = 3 * len(values) * 4 + 8
    assert payload <= stored < payload + 1700 * pieces


def _resume(rank, world, folder):
    """Six steps at once, and in three runs of two steps each with a checkpoint between them."""
    grads = [
        {name: (value + 1).mul(step + 1).sin() for name, value in _global_values().items()}
        for step in range(6)
    ]

    def start(fill):
        held = _Rank(rank, world, (2, 2, 1), lambda values: fill(values).bfloat16())
        return held, held.optimizer()

    def steps(held, optimizer, window):
        for index in window:
            for name, p in held.parameters.items():
                p.main_grad = grads[index][name][held.rows[name]].clone()
            optimizer.step()

    def everything(held, optimizer):
        state = optimizer.state_dict()
        kept = {key: getattr(value, "local", value).clone() for key, value in state.items()}
        return kept | {name: p.detach().clone() for name, p in held.parameters.items()}

    def fill(values):
        return values.cos()

    held, optimizer = start(fill)
    steps(held, optimizer, range(6))
    uninterrupted = everything(held, optimizer)

    held, optimizer = start(fill)
    steps(held, optimizer, range(2))
    for run in (1, 2):
        dcp.save(optimizer.state_dict(), checkpoint_id=f"{folder}/{run}")
        before = everything(held, optimizer)
        held, optimizer = start(torch.zeros_like)
        dcp.load(optimizer.start_loading(), checkpoint_id=f"{folder}/{run}")
        optimizer.finish_loading()
        after = everything(held, optimizer)
        assert all(torch.equal(before[key], after[key]) for key in before), "state after a load"
        steps(held, optimizer, range(2 * run, 2 * run + 2))
    resumed = everything(held, optimizer)
    assert any(value.float().frac().ne(0).any() for value in resumed.values())
    return [key for key in uninterrupted if not torch.equal(uninterrupted[key], resumed[key])]


@pytest.mark.dist
def test_resuming_twice_is_bitwise_the_uninterrupted_run(processes, tmp_path):
    assert processes.run(_resume, tmp_path, world=2) == [[], []]


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
