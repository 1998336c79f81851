import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from olmo_distopt import (
    GradientReducer,
    ReplicaGroups,
    ShardedAdamW,
    clip_grad_norm,
    global_grad_norm,
)
from olmo_distopt._checksum import checksum
from torch import nn

NO_CUDA = not torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.skipif(NO_CUDA, reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_reads_nothing_from_the_device(alone):
    named = [
        (f"p{i}", nn.Parameter(torch.ones(30, i + 1, device="cuda").bfloat16())) for i in range(3)
    ]
    reducer = GradientReducer(named, alone, bucket_bytes=400)
    optimizer = ShardedAdamW(named, alone, lr=0.1, weight_decay=0.0)

    def step():
        reducer.zero()
        for _ in range(2):
            torch.stack([parameter.sum() for _, parameter in named]).sum().backward()
        reducer.reduce()
        largest = clip_grad_norm(named, alone, 1e9, norm_type=math.inf)
        norm = clip_grad_norm(named, alone, 0.1)
        optimizer.step()
        return norm, largest

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm, largest = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert norm.item() == pytest.approx(2 * math.sqrt(180), rel=1e-6)
    assert largest.item() == 2.0
    for _, parameter in named:
        assert parameter.detach().float().cpu().sub(0.8).abs().max() < 0.01


@pytest.mark.gpu
@pytest.mark.skipif(NO_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_checksum_is_the_same_on_every_device(dtype):
    values = torch.randn(2**20 + 17, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert checksum(values.cuda()).item() == checksum(values).item()


def _over_nccl(rank, world):
    """Three steps on this rank's device; the last rank measures the norm without a parameter."""
    torch.cuda.set_device(rank)
    group: Any = dist.new_group(backend="nccl")
    groups = ReplicaGroups({"all": group}, lambda name, _: "all")
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 10), (7,), (33, 2), (128,)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    cpu: list[Any] = [(f"p{i}", nn.Parameter(value)) for i, value in enumerate(values)]
    named: list[Any] = [(name, nn.Parameter(p.detach().cuda())) for name, p in cpu]
    reducer = GradientReducer(named, groups, bucket_bytes=1000)
    optimizer = ShardedAdamW(named, groups, lr=0.1, min_shard_numel=8, bucket_bytes=1000)
    for dtype in (torch.bfloat16, torch.float32):
        apart = [("same", nn.Parameter(values[0].to("cuda", dtype)))]
        apart += [("w", nn.Parameter(torch.full((5,), 1.0 + rank, device="cuda", dtype=dtype)))]
        with pytest.raises(ValueError, match="differ in 1 of 2 parameters: `w`"):
            ShardedAdamW(apart, groups, lr=0.1)
    own = ReplicaGroups({"own": None}, lambda name, _: "own")
    oracle = ShardedAdamW(cpu, own, lr=0.1)
    for step in range(3):
        reducer.zero()
        for _, parameter in named:
            (parameter * (rank + 1.0 + step)).sum().backward()
        reducer.reduce()
        for _, parameter in cpu:
            parameter.main_grad = torch.full_like(
                parameter, sum(r + 1.0 + step for r in range(world))
            )
        norm = clip_grad_norm(named, groups, 1.0, group=group)
        for _, parameter in cpu:
            parameter.main_grad /= norm.item()
        optimizer.step()
        oracle.step()
    lonely = global_grad_norm(named if rank == 0 else [], groups, group=group)
    errors = [(a - b.cpu()).abs().max().item() for (_, a), (_, b) in zip(cpu, named, strict=True)]
    return max(errors), lonely.item(), [p.detach().cpu() for _, p in named]


@pytest.mark.dist
@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.skipif(NO_CUDA or torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_over_nccl(processes):
    (error, lonely, first), (other_error, other_lonely, second) = processes.run(_over_nccl, world=2)
    assert max(error, other_error) < 1e-5
    assert lonely == other_lonely == pytest.approx(1.0, rel=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
