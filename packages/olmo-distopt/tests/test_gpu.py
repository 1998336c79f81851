import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import gpu_of
from olmo_distopt import (
    GradientReducer,
    ReplicaGroups,
    ShardedAdamW,
    ShardedMuon,
    StepGuard,
    clip_factor,
    clip_grad_norm,
    global_grad_norm,
)
from olmo_distopt._checksum import checksum
from torch import nn

NO_CUDA = not torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.skipif(NO_CUDA, reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("make", [ShardedAdamW, ShardedMuon])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_step_reads_nothing_from_the_device(alone, make, impl):
    named = [
        (f"p{i}", nn.Parameter(torch.ones(30, i + 1, device="cuda").bfloat16())) for i in range(3)
    ]
    named.append(("line", nn.Parameter(torch.ones(50, device="cuda").bfloat16())))
    reducer = GradientReducer(named, alone, bucket_bytes=400, overlap=True, impl=impl)
    optimizer = make(named, alone, lr=0.1, weight_decay=0.0, impl=impl)
    guard = StepGuard()
    tokens, loss = (torch.full((), value, device="cuda") for value in (2.0, 3.0))

    def step(bad):
        reducer.zero()
        with reducer.no_sync():
            torch.stack([parameter.sum() for _, parameter in named]).sum().backward()
        torch.stack([parameter.sum() for _, parameter in named]).sum().backward()
        reducer.reduce(num_tokens=tokens)
        largest = clip_grad_norm(named, alone, 1e9, norm_type=math.inf)
        norm = global_grad_norm(named, alone)
        skip = guard.check(loss * bad, norm)
        optimizer.step(grad_scale=clip_factor(norm, 0.1), skip=skip)
        return norm, largest

    one, nan = (torch.full((), value, device="cuda") for value in (1.0, math.nan))
    step(one)
    before = [parameter.detach().clone() for _, parameter in named]
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(nan)
        after_bad = [parameter.detach().clone() for _, parameter in named]
        norm, largest = step(one)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert norm.item() == pytest.approx(math.sqrt(230), rel=1e-6)
    assert largest.item() == 1.0
    assert int(guard.num_skipped) == 1
    assert optimizer.num_steps == 2
    for (_, parameter), first, same in zip(named, before, after_bad, strict=True):
        assert torch.equal(first, same)
        assert (parameter < first).all()
    if make is ShardedAdamW:
        assert named[0][1].detach().float().cpu().sub(0.8).abs().max() < 0.01


@pytest.mark.gpu
@pytest.mark.skipif(NO_CUDA, reason="needs a CUDA device")
def test_a_captured_step_is_a_step(alone):
    def make():
        values = [torch.arange(1.0, numel + 1).cos() for numel in (64, 7, 5000, 4096)]
        named = [(f"p{i}", nn.Parameter(v.cuda().bfloat16())) for i, v in enumerate(values)]
        for _, parameter in named:
            vars(parameter)["main_grad"] = parameter.detach().float() * 0.1
        return named, ShardedAdamW(named, alone, lr=0.1, impl="triton")

    named, optimizer = make()
    eager, other = make()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        graph.replay()
    for _ in range(4):
        other.step()
    assert optimizer.num_steps == other.num_steps == 4
    for (_, mine), (_, theirs) in zip(named, eager, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(NO_CUDA, reason="needs a CUDA device")
def test_gradients_of_another_stream_are_waited_for(alone):
    """The reduction is launched from one stream, a gradient was added on another, late."""
    first, second = (nn.Parameter(torch.zeros(1 << 20, device="cuda")) for _ in range(2))
    reducer = GradientReducer([("a", first), ("b", second)], alone, overlap=True)
    side = torch.cuda.Stream()
    for _ in range(3):
        reducer.zero()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            first.main_grad.add_(1.0)
            reducer.gradient_added(first)
        second.sum().backward()  # the bucket is full: launched here, on the main stream
        seen = first.main_grad.clone()
        assert (seen == 1).all()
        reducer.reduce()


@pytest.mark.gpu
@pytest.mark.skipif(NO_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_checksum_is_the_same_on_every_device(dtype):
    values = torch.randn(2**20 + 17, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert checksum(values.cuda()).item() == checksum(values).item()


def _over_nccl(rank, world, kind, collective, overlap):
    """Three steps on this rank's device, and the same in one process on the CPU."""
    torch.cuda.set_device(gpu_of(rank))
    group: Any = dist.new_group(backend="nccl")
    groups = ReplicaGroups({"all": group}, lambda *_: "all")
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 10), (7,), (33, 2), (128,), (16, 16)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    for dtype in (torch.bfloat16, torch.float32):
        apart = [("same", nn.Parameter(values[0].to("cuda", dtype)))]
        apart += [("w", nn.Parameter(torch.full((5,), 1.0 + rank, device="cuda", dtype=dtype)))]
        with pytest.raises(ValueError, match="differ in 1 of 2 parameters: `w`"):
            ShardedAdamW(apart, groups, lr=0.1)

    class Holder(nn.Module):
        def __init__(self, device):
            super().__init__()
            self.held = nn.ParameterList([nn.Parameter(value.to(device)) for value in values])
            self.slopes = [value.cos().to(device) for value in values]

        def forward(self, step, source):
            pairs = zip(self.held, self.slopes, strict=True)
            terms = [(p * slope * (source + 1.3 + step)).sum() for p, slope in pairs]
            return torch.stack(terms).sum()

    make: Any = {"adamw": ShardedAdamW, "muon": ShardedMuon}[kind]
    options = {"lr": 0.1, "min_shard_numel": 8, "bucket_bytes": 1000}
    options |= {"product_dtype": torch.float32} if kind == "muon" else {}
    model, alone = Holder("cuda"), Holder("cpu")
    named: list[Any] = list(model.named_parameters())
    reducer = GradientReducer(
        *(named, groups),
        bucket_bytes=1000,
        collective=collective,
        overlap=overlap,
        min_shard_numel=8,
    )
    optimizer = make(named, groups, **options)
    if overlap:
        optimizer.overlap_gather([model])
    own = ReplicaGroups({"own": None}, lambda *_: "own")
    cpu: list[Any] = list(alone.named_parameters())
    cpu_reducer, oracle = GradientReducer(cpu, own), make(cpu, own, **options)
    for step in range(3):
        reducer.zero()
        cpu_reducer.zero()
        model(step, rank).backward()
        for source in range(world):
            alone(step, source).backward()
        reducer.reduce()
        cpu_reducer.reduce()
        norm = global_grad_norm(named, groups, group=group)
        optimizer.step(grad_scale=clip_factor(norm, 1.0))
        oracle.step(grad_scale=1.0 / norm.cpu())
    optimizer.wait()
    lonely = global_grad_norm(named if rank == 0 else [], groups, group=group)
    errors = [(a - b.cpu()).abs().max().item() for (_, a), (_, b) in zip(cpu, named, strict=True)]
    return max(errors), norm.item(), lonely.item(), [p.detach().cpu() for _, p in named]


@pytest.mark.dist
@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.skipif(NO_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("kind", "collective"),
    [("adamw", "all_reduce"), ("adamw", "reduce_scatter"), ("muon", "all_reduce")],
)
def test_two_ranks_over_nccl(processes, kind, collective):
    runs = [
        processes.run(_over_nccl, kind, collective, overlap, world=2) for overlap in (False, True)
    ]
    (_, wanted_norm, _, wanted), _ = runs[0]
    for results in runs:
        (error, norm, lonely, first), (other_error, other_norm, other_lonely, second) = results
        assert max(error, other_error) < 1e-4
        assert norm == other_norm == wanted_norm
        assert lonely == other_lonely
        if collective == "all_reduce":
            assert lonely == pytest.approx(norm, rel=1e-6)
        for mine, other, want in zip(first, second, wanted, strict=True):
            assert torch.equal(mine, other), "replicas"
            assert torch.equal(mine, want), "overlap off and on"
