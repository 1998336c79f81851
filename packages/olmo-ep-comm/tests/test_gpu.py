"""On GPUs: the CPU's result bitwise, no wait of the host, and NCCL."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import gpu_of
from olmo_ep_comm import AllToAllDispatcher, Dispatcher, LocalDispatcher
from torch import Tensor

NUM_EXPERTS = 8
needs_gpu = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")


def make_inputs(rank: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(num_tokens, 5, generator=generator).bfloat16()
    ids = torch.randint(-1, NUM_EXPERTS, (num_tokens, 3), generator=generator)
    return x_TD, ids, torch.rand(num_tokens, 3, generator=generator)


def run_layer(dispatcher: Dispatcher, inputs: tuple[Tensor, ...], device: str) -> list[Tensor]:
    x_TD, ids, weights_TK = (value.to(device) for value in inputs)
    x_TD.requires_grad_()
    weights_TK.requires_grad_()
    host_waits = not isinstance(dispatcher, LocalDispatcher)
    try:
        torch.cuda.set_sync_debug_mode("default" if host_waits else "error")
        dispatched = dispatcher.dispatch(x_TD, ids, weights_TK)
        y_RD = dispatched.rows_RD * dispatched.row_weights_R[:, None].bfloat16() * 3
        y_TD = dispatcher.combine(y_RD, dispatched.handle)
        y_TD.backward(y_TD.detach())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x_TD.grad is not None
    assert weights_TK.grad is not None
    return [value.cpu() for value in (y_TD.detach(), x_TD.grad, weights_TK.grad)]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_gpu_equals_cpu_bitwise_and_the_host_never_waits():
    dispatcher = LocalDispatcher(num_experts=NUM_EXPERTS)
    for num_tokens in (0, 1, 1000):
        inputs = make_inputs(0, num_tokens)
        got, want = (run_layer(dispatcher, inputs, device) for device in ("cuda", "cpu"))
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
        torch.testing.assert_close(got[2], want[2])  # its sum over D has another order


@needs_gpu
@pytest.mark.gpu
def test_rows_that_no_route_fills_are_left_past_the_last_end():
    x_TD, ids, weights_TK = (value.cuda() for value in make_inputs(0, 40))
    dispatched = LocalDispatcher(num_experts=NUM_EXPERTS).dispatch(x_TD, ids, weights_TK)
    assert dispatched.rows_RD.shape[0] == ids.numel()
    assert dispatched.offsets_E[-1] == (ids >= 0).sum()


@needs_gpu
@pytest.mark.gpu
def test_an_unknown_id_is_a_device_side_assertion():
    """In a process of its own, since the assertion ends the use of the GPU."""
    code = (
        "import torch; from olmo_ep_comm import LocalDispatcher; x = torch.ones(1, 1);"
        "LocalDispatcher(num_experts=2).dispatch(*(v.cuda() for v in (x, torch.tensor([[2]]), x)));"
        "torch.cuda.synchronize()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=240
    )
    assert result.returncode != 0
    assert "`expert_ids_TK` must hold ids" in result.stderr


@needs_gpu
@pytest.mark.gpu
def test_routes_without_room_are_a_device_side_assertion_where_none_may_be_dropped():
    """Two slots of a token for the only expert, and a default capacity of one row a token."""
    code = (
        "import torch; from olmo_ep_comm import VirtualRowwise;"
        "sizes = dict(num_ranks=1, num_experts=1, max_tokens=2, width=8, top_k=2, device='cuda');"
        "layer = VirtualRowwise(**sizes); x = torch.ones(2, 8).bfloat16().cuda();"
        "weights = torch.ones(2, 2).cuda(); ids = torch.tensor([[0, -1]] * 2).cuda();"
        "layer.dispatch([x], [ids], [weights]); torch.cuda.synchronize(); print('fits');"
        "layer.dispatch([x], [ids * 0], [weights]); torch.cuda.synchronize(); print('more')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=240
    )
    assert result.returncode != 0
    assert result.stdout == "fits\n"
    assert "as many routes as when no token names an expert twice, 2, got" in result.stderr


def _run_on_nccl(rank: int, world: int) -> None:
    torch.cuda.set_device(gpu_of(rank))
    group = dist.new_group(backend="nccl", device_id=gpu_of(rank))
    assert isinstance(group, dist.ProcessGroup)
    try:
        dispatcher = AllToAllDispatcher(num_experts=NUM_EXPERTS, group=group)
        for tokens in ((1000, 300), (0, 7), (0, 0)):
            parts = [make_inputs(other, tokens[other]) for other in range(world)]
            whole = tuple(torch.cat(part) for part in zip(*parts, strict=True))
            want = run_layer(LocalDispatcher(num_experts=NUM_EXPERTS), whole, "cuda")
            got = run_layer(dispatcher, parts[rank], "cuda")
            for value, reference in zip(got, want, strict=True):
                assert torch.equal(value, reference.split(tokens)[rank])
    finally:
        dist.destroy_process_group(group)


@needs_gpu
@pytest.mark.dist
@pytest.mark.multigpu
def test_nccl_equals_one_process_bitwise(processes):
    processes.run(_run_on_nccl, world=2)
