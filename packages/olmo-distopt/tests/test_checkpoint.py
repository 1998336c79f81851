"""Optimizer state saved under one layout and loaded under another, element for element."""

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from olmo_distopt import (
    FlatShard,
    Location,
    ReplicaGroups,
    ShardedAdamW,
    ShardedMuon,
    is_hidden_matrix,
)
from olmo_distopt.reference import adamw, muon
from torch import nn

# (data, expert, pipeline): data x pipeline processes; expert divides data.
LAYOUTS = [
    (1, 1, 1),
    (2, 1, 1),
    (3, 1, 1),
    (4, 1, 1),
    (2, 2, 1),
    (4, 2, 1),
    (4, 4, 1),
    (1, 1, 2),
    (2, 1, 2),
    (2, 2, 2),
]
# Pairs of which public bug reports tell: every kind of optimizer is loaded both ways.
REPORTED = [((2, 2, 1), other) for other in [(4, 1, 1), (1, 1, 2), (4, 4, 1), (1, 1, 1)]]
BUCKET_BYTES = [1, 300, 10**6]
E, D, H, LAYERS = 4, 3, 5, 2
LR = 0.01
OFFSETS = {"main": 0.0, "exp_avg": 0.25, "exp_avg_sq": 0.5, "momentum": 0.125}
MOMENT_DTYPES = {
    "adamw": torch.float32,
    "adamw, BF16 moments": torch.bfloat16,
    "muon": torch.float32,
}


def _shapes(layer):
    """Big and tiny tensors side by side; 2 elements are never cut, 15 by three alone."""
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

    def optimizer(self, kind, bucket_bytes=100):
        options = {
            "lr": LR,
            "min_shard_numel": 8,
            "bucket_bytes": bucket_bytes,
            "locations": self.locations,
        }
        if kind == "muon":
            return ShardedMuon(
                self.parameters.items(), self.groups, product_dtype=torch.float32, **options
            )
        return ShardedAdamW(
            self.parameters.items(), self.groups, moment_dtype=MOMENT_DTYPES[kind], **options
        )


def _kept(kind, key, values):
    """What a checkpoint holds under `key` of the form `main.NAME`, every element another."""
    what, _, name = key.partition(".")
    value = values[name] + OFFSETS[what]
    return value if what == "main" else value.to(MOMENT_DTYPES[kind]).float()


def _keys(kind, values):
    """All keys of a whole checkpoint but `step`."""
    keys = []
    for name, value in values.items():
        is_muon = kind == "muon" and is_hidden_matrix(name, nn.Parameter(value))
        moments = ["momentum"] if is_muon else ["exp_avg", "exp_avg_sq"]
        keys += [f"{what}.{name}" for what in ["main", *moments]]
    return keys


def _save(rank, world, layout, folders):
    """Main weights start from the parameters; moments are written through the labels."""
    held = _Rank(rank, world, layout, lambda values: values)
    values = _global_values()
    for kind, folder in folders.items():
        state: dict[str, Any] = held.optimizer(kind).state_dict()
        for key, shard in state.items():
            if key != "step":
                line = _kept(kind, key, values).view(-1)
                shard.local.copy_(line[shard.start : shard.start + shard.local.numel()])
        state["step"].fill_(3)
        state["buffer"] = FlatShard(torch.arange(5))
        dcp.save(state, checkpoint_id=folder)


def _load(rank, world, layout, checkpoints):
    """Load each checkpoint into an optimizer that knew other values, then take a step."""
    held = _Rank(rank, world, layout, lambda values: values * 0 - 7)
    return held.rows, [_load_one(held, *checkpoint) for checkpoint in checkpoints]


def _load_one(held, folder, kind, bucket_bytes):
    for p in held.parameters.values():
        p.detach().fill_(-7)
    optimizer = held.optimizer(kind, bucket_bytes)
    buffer = torch.zeros(5, dtype=torch.int64)
    dcp.load({**optimizer.start_loading(), "buffer": FlatShard(buffer)}, checkpoint_id=folder)
    with pytest.raises(RuntimeError, match=r"`step\(\)` must wait"):
        optimizer.step()
    optimizer.finish_loading()
    assert buffer.tolist() == list(range(5))
    values = _global_values()
    for key, shard in optimizer.state_dict().items():
        if key != "step":
            line = _kept(kind, key, values).view(-1)[shard.start :][: shard.local.numel()]
            assert torch.equal(shard.local.float(), line), key
    loaded = {name: p.detach().clone() for name, p in held.parameters.items()}
    for name, p in held.parameters.items():
        vars(p)["main_grad"] = values[name].cos()[held.rows[name]]
    optimizer.step()
    stepped = {name: p.detach().clone() for name, p in held.parameters.items()}
    return loaded, stepped, optimizer.num_steps


@pytest.fixture(scope="module")
def saved(processes, tmp_path_factory):
    """By layout and kind of optimizer, the folder of a checkpoint that was saved so."""
    folders = {}
    for layout in LAYOUTS:
        folders[layout] = {kind: tmp_path_factory.mktemp("checkpoint") for kind in MOMENT_DTYPES}
        processes.run(_save, layout, folders[layout], world=layout[0] * layout[2])
    return folders


def _checkpoints_for(loaded, saved):
    """Of every layout the folder of one kind in turn; every kind of a pair that was reported."""
    checkpoints = []
    for index, (layout, folders) in enumerate(saved.items()):
        kinds = list(folders)
        turn = index + LAYOUTS.index(loaded)
        if not {(layout, loaded), (loaded, layout)} & set(REPORTED):
            kinds = [kinds[turn % len(kinds)]]
        for place, kind in enumerate(kinds):
            limit = BUCKET_BYTES[(turn // len(BUCKET_BYTES) + place) % len(BUCKET_BYTES)]
            checkpoints.append((folders[kind], kind, limit))
    return checkpoints


@pytest.mark.dist
@pytest.mark.parametrize("loaded", LAYOUTS, ids=str)
def test_every_layout_loads_every_other(processes, saved, loaded):
    values = _global_values()
    checkpoints = _checkpoints_for(loaded, saved)
    results = processes.run(_load, loaded, checkpoints, world=loaded[0] * loaded[2])
    for index, (folder, kind, _) in enumerate(checkpoints):
        seen = set()
        wanted = {name: _next_step(kind, name, values) for name in values}
        for rows, loads in results:
            weights, stepped, num_steps = loads[index]
            assert num_steps == 4
            for name, weight in weights.items():
                seen.add(name)
                assert torch.equal(weight, values[name][rows[name]]), (folder, name)
                expected = wanted[name][rows[name]]
                torch.testing.assert_close(stepped[name].double(), expected, rtol=1e-6, atol=1e-6)
        assert seen == set(values)


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", MOMENT_DTYPES)
def test_every_layout_saves_global_lines(saved, layout, kind):
    """Read the checkpoint with plain tensors in one process: each is its whole line, in order."""
    folder, values = saved[layout][kind], _global_values()
    keys = _keys(kind, values)
    whole = {key: torch.full((values[key.partition(".")[2]].numel(),), math.nan) for key in keys}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(whole, checkpoint_id=folder)
    payload = 8 + 5 * 8
    for key, line in whole.items():
        assert torch.equal(line, _kept(kind, key, values).view(-1)), key
        is_moment = not key.startswith("main")
        payload += line.numel() * (MOMENT_DTYPES[kind].itemsize if is_moment else 4)
    stored = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    pieces = len(keys) * 4 + 8
    assert payload <= stored < payload + 1700 * pieces


def _next_step(kind, name, values):
    """The whole parameter after one step from what the checkpoint holds, in float64."""
    weight, grad = values[name].double(), values[name].cos().double()
    decay = 0.0 if "norm" in name else 0.1
    if f"momentum.{name}" in _keys(kind, values):
        triples = [
            value.double().view(-1, *weight.shape[-2:])
            for value in (weight, grad, _kept(kind, f"momentum.{name}", values))
        ]
        options = {"lr": LR, "momentum": 0.95, "nesterov": True, "scale": "adamw_rms"}
        new = [muon(*each, **options, weight_decay=decay)[0] for each in zip(*triples, strict=True)]
        return torch.stack(new).view(weight.shape)
    moments = [_kept(kind, f"{what}.{name}", values).double() for what in ("exp_avg", "exp_avg_sq")]
    options = {"step": 4, "lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay}
    return adamw(weight, grad, *moments, **options)[0]


def _resume(rank, world, folder, kind):
    """Twelve steps at once, and in runs of two, five and five with checkpoints between them."""
    grads = [
        {name: (value + 1).mul(step + 1).sin() for name, value in _global_values().items()}
        for step in range(12)
    ]

    def start(fill):
        held = _Rank(rank, world, (2, 2, 1), lambda values: fill(values).bfloat16())
        return held, held.optimizer(kind)

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
    steps(held, optimizer, range(12))
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
        steps(held, optimizer, range(5 * run - 3, 5 * run + 2))
    resumed = everything(held, optimizer)
    assert any(value.float().frac().ne(0).any() for value in resumed.values())
    return [key for key in uninterrupted if not torch.equal(uninterrupted[key], resumed[key])]


@pytest.mark.dist
@pytest.mark.parametrize("kind", MOMENT_DTYPES)
def test_resuming_twice_is_bitwise_the_uninterrupted_run(processes, tmp_path, kind):
    assert processes.run(_resume, tmp_path, kind, world=2) == [[], []]
