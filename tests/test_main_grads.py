"""Experts whose kernels add weight gradients straight into the buffers that a reducer sums."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import gpu_of
from olmo_distopt import GradientReducer, ReplicaGroups
from olmo_experts_gemm import Experts

E, D, H, ROWS, MICROBATCHES = 4, 64, 32, 40, 3
IDLE, IDLE_AT_THE_END = 2, 0
# Half a place of the dtype in which autograd rounds each gradient, or some roundings of a sum.
ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8}


def _rows(rank, microbatch, dtype, device):
    """Rows, where those of each expert end, and weights of the rows."""
    draw = torch.Generator().manual_seed(10 * microbatch + rank)
    is_last = microbatch == MICROBATCHES - 1
    counts = torch.tensor([0 if is_last else 7 + rank, 11, 0, 5 + microbatch])
    rows, weights = torch.randn(ROWS, D, generator=draw), torch.rand(ROWS, generator=draw)
    offsets = counts.cumsum(0).to(device, torch.int32)
    return rows.to(device, dtype), offsets, weights.to(device)


def _loss(experts, rank, microbatch, main_grads=None):
    leaf = next(experts.parameters())
    rows, offsets, weights = _rows(rank, microbatch, leaf.dtype, leaf.device)
    y = experts(rows, offsets, row_weights_R=weights, main_grads=main_grads)
    return (y.float() * torch.linspace(-1, 1, D, device=y.device)).sum()


def _autograds(experts, world):
    """By name: what autograd brings for every rank and microbatch, summed in float64."""
    named = dict(experts.named_parameters())
    sums = {name: torch.zeros_like(each, dtype=torch.float64) for name, each in named.items()}
    sizes = dict.fromkeys(named, 0.0)
    for rank in range(world):
        for microbatch in range(MICROBATCHES):
            grads = torch.autograd.grad(_loss(experts, rank, microbatch), list(named.values()))
            for name, grad in zip(named, grads, strict=True):
                sums[name] += grad.double()
                sizes[name] += float(grad.abs().max())
    return sums, sizes


def _join(rank, world, dtype, overlap, cuda):
    """Two windows: the second one finds buffers that a reduction has written."""
    device = gpu_of(rank) if cuda else torch.device("cpu")
    group: Any = dist.group.WORLD
    if cuda:
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl")
    experts = Experts(E, D, H, bias=True)
    experts.reset_parameters(generator=torch.Generator().manual_seed(0))
    experts.to(device, dtype)
    sums, sizes = _autograds(experts, world)
    groups = ReplicaGroups({"all": group}, lambda *_: "all")
    # Two buckets: a stack behind both biases, whose gradients autograd brings, and a stack alone.
    named = list(experts.named_parameters())
    reducer = GradientReducer(named, groups, bucket_bytes=5 * E * D * H, overlap=overlap)
    stacks: list[Any] = [experts.w_gate_up_E2HD, experts.w_down_EDH]
    for _ in range(2):
        reducer.zero()
        for microbatch in range(MICROBATCHES):
            is_last = microbatch == MICROBATCHES - 1
            with contextlib.nullcontext() if is_last else reducer.no_sync():
                main_grads = (stacks[0].main_grad, stacks[1].main_grad)
                _loss(experts, rank, microbatch, main_grads).backward()
                assert all(stack.grad is None for stack in stacks)
        reducer.reduce()
        for name, parameter in named:
            got, want = vars(parameter)["main_grad"], sums[name]
            bound = ROUNDING[dtype] * sizes[name]
            torch.testing.assert_close(got.double(), want, rtol=0, atol=bound, msg=name)
            assert not got[IDLE].any(), name
            assert got[IDLE_AT_THE_END].abs().max() > 5 * bound, name
            assert torch.isfinite(got).all()
    kept = [vars(parameter)["main_grad"].cpu().clone() for _, parameter in named]
    reducer.close()
    return kept


def _assert_joined(processes, dtype, cuda):
    results = [
        grads
        for overlap in (False, True)
        for grads in processes.run(_join, dtype, overlap, cuda, world=2)
    ]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.dist
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_what_kernels_add_is_reduced_as_what_autograd_brings(processes, dtype):
    _assert_joined(processes, dtype, False)


@pytest.mark.dist
@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_what_kernels_add_is_reduced_on_a_gpu(processes, dtype):
    _assert_joined(processes, dtype, True)
