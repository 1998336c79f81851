"""Whole steps on ordinary floats, of which sums depend on their order: the same bits everywhere."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from olmo_distopt import (
    GradientReducer,
    ReplicaGroups,
    ShardedAdamW,
    ShardedMuon,
    clip_grad_norm,
)
from torch import nn

MICROBATCHES = 3


class _Crossed(nn.Module):
    """Layers that are used in another order than they are registered, one of them not always."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(12, 12, bias=i % 2 == 0) for i in range(4))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw) / 4

    def forward(self, x, skips):
        for index in (2, 0, 3, 1):
            if not (skips and index == 3):
                x = torch.tanh(self.layers[index](x))
        return x.square().sum()


def _train(rank, world, collective, overlap):
    """Five steps of three microbatches; every step's gradients of the own range, and weights."""
    model = _Crossed()
    named = list(model.named_parameters())
    groups = ReplicaGroups({"all": dist.group.WORLD}, lambda *_: "all")
    optimizer = ShardedAdamW(named, groups, lr=0.05, min_shard_numel=8, bucket_bytes=300)
    if overlap:
        optimizer.overlap_gather(model.layers)
    reducer = GradientReducer(
        *(named, groups),
        collective=collective,
        overlap=overlap,
        min_shard_numel=8,
        bucket_bytes=900,
    )
    seen = []
    for step in range(5):
        reducer.zero()
        for index in range(MICROBATCHES):
            draw = torch.Generator().manual_seed(100 * step + 10 * index + rank)
            x = torch.randn(5, 12, generator=draw)
            is_last = index == MICROBATCHES - 1
            with contextlib.nullcontext() if is_last else reducer.no_sync():
                model(x, is_last and step % 2 == 1).backward()
        reducer.reduce(num_tokens=5 * MICROBATCHES)
        for _, parameter in named:
            line = vars(parameter)["main_grad"].view(-1)
            held = vars(parameter).get("main_grad_range", (0, line.numel()))
            seen.append(line.narrow(0, *held).clone())
        optimizer.step()
        for _, parameter in named:  # poisoned: nothing of a step is left for the next one
            vars(parameter)["main_grad"].fill_(torch.nan)
    optimizer.wait()
    return [*seen, *(parameter.detach() for _, parameter in named)]


@pytest.mark.dist
@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_overlap_changes_no_bit_of_ordinary_floats(processes, world, collective):
    plain, overlapped = (
        processes.run(_train, collective, overlap, world=world) for overlap in (False, True)
    )
    for rank, both in enumerate(zip(plain, overlapped, strict=True)):
        for index, (mine, other) in enumerate(zip(*both, strict=True)):
            assert torch.equal(mine, other), (rank, index)
            assert mine.isfinite().all()
            assert mine.any()


def _clipped_steps(rank, world, kind, collective):
    """Twenty clipped steps of dense weights on all ranks and experts on every other one."""
    pairs: list[Any] = [dist.new_group([first, first + 2]) for first in range(2)]
    groups = ReplicaGroups(
        {"dense": dist.group.WORLD, "expert": pairs[rank % 2]},
        lambda name, _: "expert" if "experts" in name else "dense",
    )
    # In either group tensors that are cut, or owned by one, and such as each replica keeps whole.
    shapes = {"up": (6, 8), "norm": (8,), "odd": (3, 3)}
    own = {"w": (2, 4, 6), "b_ED": (2, 4), "norm": (5,)}
    shapes |= {f"experts.{rank % 2}.{name}": shape for name, shape in own.items()}
    named: list[tuple[str, Any]] = []
    for name, shape in shapes.items():
        draw = torch.Generator().manual_seed(len(name) + 10 * (rank % 2 if "." in name else 0))
        named.append((name, nn.Parameter(torch.randn(shape, generator=draw))))
    options: Any = {"lr": 0.05, "min_shard_numel": 8}
    make: Any = {"adamw": ShardedAdamW, "muon": ShardedMuon}[kind]
    optimizer = make(named, groups, **options)
    assert any("momentum" in key for key in optimizer.state_dict()) == (kind == "muon")
    reducer = GradientReducer(
        named, groups, collective=collective, min_shard_numel=8, bucket_bytes=150
    )
    norms = []
    for step in range(20):
        reducer.zero()
        for index, (_, parameter) in enumerate(named):
            draw = torch.Generator().manual_seed(1000 * step + 10 * index + rank)
            (parameter * torch.randn(parameter.shape, generator=draw)).sum().backward()
        reducer.reduce()
        norms.append(clip_grad_norm(named, groups, 1.0).item())
        optimizer.step()
    return norms, {name: parameter.detach() for name, parameter in named}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "collective"),
    [("adamw", "all_reduce"), ("adamw", "reduce_scatter"), ("muon", "all_reduce")],
)
def test_twenty_clipped_steps_keep_replicas_bitwise_equal(processes, kind, collective):
    results = processes.run(_clipped_steps, kind, collective, world=4)
    wanted, _ = results[0]
    assert min(wanted) > 1.0, "clipping must take part"
    held: dict[str, list[torch.Tensor]] = {}
    for norms, weights in results:
        assert norms == wanted
        for name, weight in weights.items():
            held.setdefault(name, []).append(weight)
    assert sorted(len(replicas) for replicas in held.values()) == [2] * 6 + [4] * 3
    for name, replicas in held.items():
        assert all(torch.equal(replicas[0], other) for other in replicas[1:]), name
        assert replicas[0].isfinite().all()
