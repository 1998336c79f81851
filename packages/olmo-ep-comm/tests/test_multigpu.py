"""The one-sided exchange between GPUs: one process's rows bitwise, no wait of the host, graphs.

Every call has a time-out, here and in the barriers, so that nothing can hang a run.
"""

import pytest
import rowwise_ranks
import torch
import torch.distributed as dist
from gpu_ranks import gpu_of
from olmo_ep_comm import AllToAllDispatcher, Dispatcher, RowwiseDispatcher
from pair_codecs import MXFP8
from pair_layers import assert_equal_pairs, run_pairs
from torch import Tensor

pytestmark = [
    pytest.mark.dist,
    pytest.mark.multigpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
E, K, D = 8, 3, 256


def make_inputs(rank: int, num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    ids = torch.rand(num_tokens, E, generator=generator).topk(K).indices
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
    x_TD = torch.randn(num_tokens, D, generator=generator).bfloat16()
    weights_TK = torch.rand(num_tokens, K, generator=generator)
    return x_TD.cuda(), ids.cuda(), weights_TK.cuda()


def nccl_group(rank: int) -> dist.ProcessGroup:
    torch.cuda.set_device(gpu_of(rank))
    group = dist.new_group(backend="nccl", device_id=gpu_of(rank))
    assert isinstance(group, dist.ProcessGroup)
    return group


def make(group: dist.ProcessGroup, **options) -> RowwiseDispatcher:
    options = {"max_tokens": 64, "width": D, "top_k": K, "timeout_s": 60.0, **options}
    return RowwiseDispatcher(num_experts=E, group=group, **options)


def run_layer(dispatcher: Dispatcher, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Return results and gradients; nothing here waits for the device."""
    x_TD, ids, weights_TK = inputs
    x_TD, weights_TK = x_TD.detach().requires_grad_(), weights_TK.detach().requires_grad_()
    sent = dispatcher.dispatch(x_TD, ids, weights_TK)
    y_RD = sent.rows_RD * 3 * sent.row_weights_R[:, None].bfloat16()
    y_TD = dispatcher.combine(y_RD, sent.handle)
    slope = torch.arange(D, device=x_TD.device).bfloat16().cos().expand(y_TD.shape)
    gradients = torch.autograd.grad(y_TD, (x_TD, weights_TK), slope)
    return [y_TD.detach(), *gradients]


def _compare(rank: int, world: int) -> None:
    group = nccl_group(rank)
    try:
        ours, theirs = make(group, combine_by="put"), AllToAllDispatcher(num_experts=E, group=group)
        fetching = make(group, combine_by="get")
        for seed, tokens in enumerate(((64, 64), (64, 0), (0, 0), (1, 33))):
            inputs = make_inputs(rank, tokens[rank], seed)
            with torch.no_grad():
                got, want = ours.dispatch(*inputs), theirs.dispatch(*inputs)
                end = int(got.offsets_E[-1])
                assert torch.equal(got.offsets_E, want.offsets_E)
                assert torch.equal(got.rows_RD[:end], want.rows_RD)
                assert torch.equal(got.row_weights_R[:end], want.row_weights_R)
                for dispatcher, sent in ((ours, got), (theirs, want)):
                    dispatcher.combine(sent.rows_RD.clone(), sent.handle)
                del got, want, sent
            y, grad, grad_weights = zip(
                run_layer(ours, inputs), run_layer(theirs, inputs), strict=True
            )
            # Three roundings of 2^-9, each of at most the sum of what is added; |slope| <= 1.
            bound_T1 = 2.0**-7 * 3 * inputs[2].sum(1, keepdim=True)
            assert ((y[0] - y[1]).abs().float() <= bound_T1 * inputs[0].abs().float()).all()
            assert ((grad[0] - grad[1]).abs().float() <= bound_T1).all()
            torch.testing.assert_close(*grad_weights, rtol=1e-2, atol=1e-2)
            fetched = run_layer(fetching, inputs)
            assert all(map(torch.equal, fetched, (y[0], grad[0], grad_weights[0])))
    finally:
        dist.destroy_process_group(group)


def test_rows_are_those_of_all_to_all(processes):
    processes.run(_compare, world=2, timeout=180)


def _never_wait_and_capture(rank: int, world: int, combine_by: str) -> None:
    group = nccl_group(rank)
    try:
        dispatcher = make(group, combine_by=combine_by)
        static = make_inputs(rank, 64)
        run_layer(dispatcher, static)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager = run_layer(dispatcher, static)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run_layer(dispatcher, static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run_layer(dispatcher, static)
        graph.replay()
        assert all(map(torch.equal, captured, eager))
        for seed in range(1, 4):
            for value, new in zip(static, make_inputs(rank, 64, seed), strict=True):
                value.copy_(new)
            graph.replay()
            replayed = [value.clone() for value in captured]
            assert all(map(torch.equal, replayed, run_layer(dispatcher, static)))
    finally:
        dist.destroy_process_group(group)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("combine_by", ["put", "get"])
def test_the_host_never_waits_and_a_graph_replays_other_routes(processes, combine_by):
    processes.run(_never_wait_and_capture, combine_by, world=2, timeout=180)


def _stress(rank: int, world: int, combine_by: str) -> None:
    group = nccl_group(rank)
    try:
        dispatcher = make(group, live_forwards=2, combine_by=combine_by)
        barrier = dispatcher._buffers.memory.barrier
        late = torch.Generator().manual_seed(rank)

        def delayed_barrier() -> None:
            torch.cuda._sleep(int(torch.randint(200_000, (), generator=late)))
            barrier()
            torch.cuda._sleep(int(torch.randint(200_000, (), generator=late)))

        inputs = [make_inputs(rank, 64 - rank, seed) for seed in range(8)]
        want = [run_layer(dispatcher, one) for one in inputs]
        dispatcher._buffers.memory.barrier = delayed_barrier
        for number in range(200):
            got = run_layer(dispatcher, inputs[number % 8])
            assert all(map(torch.equal, got, want[number % 8])), number
    finally:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("combine_by", ["put", "get"])
def test_late_gpus_never_meet_overwritten_rows(processes, combine_by):
    processes.run(_stress, combine_by, world=2, timeout=180)


def _send_pairs(rank: int, world: int) -> None:
    group = nccl_group(rank)
    try:
        codecs = {"codec": MXFP8, "backward_codec": MXFP8}
        ours = make(group, **codecs)
        theirs = AllToAllDispatcher(num_experts=E, group=group, **codecs)
        inputs = make_inputs(rank, 64)
        assert_equal_pairs(run_pairs(ours, inputs), run_pairs(theirs, inputs), exact=False)
        with torch.no_grad():
            got, want = ours.dispatch(*inputs), theirs.dispatch(*inputs)
        assert got.encoded is not None
        assert want.encoded is not None
        for mine, reference in zip(got.encoded, want.encoded, strict=True):
            mine, reference = mine.view(torch.uint8), reference.view(torch.uint8)
            assert torch.equal(mine[: len(reference)], reference)
    finally:
        dist.destroy_process_group(group)


def test_pairs_cross_the_link_bitwise(processes):
    processes.run(_send_pairs, world=2, timeout=180)


@pytest.mark.parametrize("combine_by", ["put", "get"])
def test_drops_are_those_of_the_policy_and_counted(processes, combine_by):
    run = rowwise_ranks.drop_what_has_no_room
    first, second = processes.run(run, "cuda", combine_by, world=2, timeout=180)
    assert sum(first) > 0
    assert sum(second) > 0


@pytest.mark.parametrize("combine_by", ["put", "get"])
def test_two_forwards_alive_are_as_each_alone(processes, combine_by):
    run = rowwise_ranks.keep_two_forwards_alive
    processes.run(run, "cuda", combine_by, world=2, timeout=180)


def test_two_dispatchers_used_in_turn_are_as_each_alone(processes):
    processes.run(rowwise_ranks.use_two_dispatchers_in_turn, "cuda", world=2, timeout=180)
