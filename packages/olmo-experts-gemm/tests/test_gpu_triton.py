"""What only a GPU shows of the Triton kernels: no host sync, graphs, memory, 64-bit addresses."""

import contextlib
import gc

import pytest
import torch
from later import Postponed
from olmo_experts_gemm import grouped_mm, moe_mlp, swiglu_experts
from olmo_experts_gemm._grouped_mm import pick

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]
ACTIVATIONS = ["swiglu", "geglu", "relu_squared", "clamped_swiglu"]


def _normal(*shape, seed=0, scale=1.0, device="cuda"):
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(*shape, generator=generator, device=device) * scale
    return values.to(torch.bfloat16)


def _layer(T=515, K=2, E=8, D=256, H=192, gated=True, device="cuda"):
    """Ids, leaves (tokens, weights, stacks, biases) and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.rand(T, E, generator=generator, device=device).argsort(1)[:, :K]
    ids[::7, K - 1] = -1
    width = 2 * H if gated else H
    leaves = [
        _normal(T, D, seed=2, device=device),
        torch.rand(T, K, generator=generator, device=device),
        _normal(E, width, D, seed=3, scale=D**-0.5, device=device),
        _normal(E, D, H, seed=4, scale=H**-0.5, device=device),
        _normal(E, width, seed=5, device=device),
        _normal(E, D, seed=6, device=device),
    ]
    return ids, [leaf.requires_grad_() for leaf in leaves], _normal(T, D, seed=7, device=device)


def _step(ids, leaves, dy, **options):
    x, weights, w_gate_up, w_down, b_gate_up, b_down = leaves
    biases = {"b_gate_up_E2H": b_gate_up, "b_down_ED": b_down}
    y = moe_mlp(x, ids, weights, w_gate_up, w_down, impl="triton", **biases, **options)
    return y.detach(), *torch.autograd.grad(y, leaves, dy, allow_unused=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_layer_never_waits_for_the_device(no_host_sync, activation):
    ids, leaves, dy = _layer(gated=activation != "relu_squared")
    main_grads = tuple(torch.zeros_like(w, dtype=torch.float32) for w in leaves[2:4])
    for options in ({}, {"main_grads": main_grads}):
        first = _step(ids, leaves, dy, activation=activation, **options)
        with no_host_sync():
            again = _step(ids, leaves, dy, activation=activation, **options)
        for a, b in zip(first, again, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
        assert [a is None for a in again[3:5]] == ["main_grads" in options] * 2


def test_rows_never_wait_for_the_device(oracle, no_host_sync):
    _, (x, weights, w_gate_up, w_down, *_), dy = _layer()
    offsets, row_weights = oracle.ends([70, 0, 200, 0, 1, 90, 64, 0], "cuda"), weights[:, 0]
    with torch.no_grad():
        swiglu_experts(x, w_gate_up, w_down, offsets, row_weights_R=row_weights, impl="triton")
    for weighted in (None, row_weights):
        for repeat in range(2):
            with no_host_sync() if repeat else torch.enable_grad():
                y = swiglu_experts(
                    x, w_gate_up, w_down, offsets, row_weights_R=weighted, impl="triton"
                )
                y.backward(dy)
                grouped_mm(x, w_gate_up, offsets, impl="triton").sum().backward()


def test_a_captured_graph_follows_its_inputs():
    ids, leaves, dy = _layer()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            _step(ids, leaves, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _step(ids, leaves, dy)
    for shift in (0, 3):
        moved = torch.where(ids < 0, ids, (ids + shift) % 8)
        want = _step(moved, leaves, dy)
        ids.copy_(moved)
        graph.replay()
        for got, value in zip(captured, want, strict=True):
            assert torch.equal(got, value)


def test_bytes_held_between_forward_and_backward():
    T, K, E, D, H = 4096, 4, 8, 512, 256
    ids, leaves, dy = _layer(T, K, E, D, H)
    _step(ids, leaves, dy)

    def requested():
        gc.collect()  # what other tests left in cycles would be let go of in between
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    for _ in range(2):
        before = requested()
        y = moe_mlp(leaves[0], ids, *leaves[1:4], impl="triton")
        held, R = requested() - before - y.numel() * 2, T * K
        assert held == 2 * 2 * R * H + 4 * (2 * R + E)  # the tokens are the caller's
        before = requested()
        with torch.no_grad():
            moe_mlp(leaves[0], ids, *leaves[1:4], impl="triton")
        assert requested() == before
        torch.autograd.grad(y, leaves[:4], dy)
        del y


@pytest.mark.parametrize("H", [192, 1024])  # from 1024 on rows are copied before their products
@pytest.mark.parametrize("into_buffers", [False, True])
def test_deferred_weight_gradients_have_the_bits_of_one_backward(no_host_sync, H, into_buffers):
    ids, leaves, dy = _layer(H=H)
    results = []
    for defer in (None, Postponed(), Postponed()):  # the second compiles
        x, weights, *stacks = (leaf.detach().clone().requires_grad_() for leaf in leaves)
        up, down, b_up, b_down = (torch.nn.Parameter(stack.detach()) for stack in stacks)
        options = {"b_gate_up_E2H": b_up, "b_down_ED": b_down, "defer": defer}
        pair = tuple(torch.zeros_like(w, dtype=torch.float32) for w in (up, down))
        if into_buffers:
            options["main_grads"] = pair
        with no_host_sync() if defer is not None and results[1:] else contextlib.nullcontext():
            y = moe_mlp(x, ids, weights, up, down, impl="triton", **options)
            y.backward(dy)
            if defer is not None:
                assert up.grad is down.grad is b_up.grad is b_down.grad is None
                assert defer.run() == 1
        stack_gradients = pair if into_buffers else (up.grad, down.grad)
        results.append((y, x.grad, weights.grad, *stack_gradients, b_up.grad, b_down.grad))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("H", [256, 1024])
def test_bytes_held_between_backward_and_deferred_weight_gradients(H):
    T, K, E, D = 4096, 4, 8, 512
    ids, (x, weights, up, down, *_), dy = _layer(T, K, E, D, H)
    x, weights, up, down = x.detach(), weights.detach(), *map(torch.nn.Parameter, (up, down))

    def requested():
        gc.collect()
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    for repeat in range(2):  # the first compiles
        defer, before, R = Postponed(), requested(), T * K
        moe_mlp(x, ids, weights, up, down, impl="triton", defer=defer).backward(dy)
        held = requested() - before
        assert defer.run() == 1
        up.grad = down.grad = None
        if repeat:
            assert held == 6 * R * H + 8 * R + 4 * E  # the tokens and `dy` are the caller's
            assert requested() == before


def test_empty_experts_get_zeros_from_used_memory(oracle):
    w = _normal(5, 256, 128).requires_grad_()
    for counts in ([400] * 5, [500, 0, 0, 300, 0]):
        x = torch.full((2000, 128), 3e38, device="cuda", dtype=torch.bfloat16)
        x[: sum(counts)] = 1e30 if counts[1] else 1.0
        dy = torch.ones(2000, 256, device="cuda", dtype=torch.bfloat16)
        y = grouped_mm(x, w, oracle.ends(counts, "cuda"), impl="triton")
        (dw,) = torch.autograd.grad(y, w, dy)
        del x, y, dy
        assert dw.isfinite().all()
        for expert, count in enumerate(counts):
            assert count or (dw[expert] == 0).all(), expert
        if not counts[1]:
            assert (dw[0] == 500).all()
            assert (dw[3] == 300).all()


def test_auto_takes_the_kernels_where_they_run():
    x = _normal(5, 16)
    assert pick("auto", x, 5, 4, 16, 24) == "triton"
    assert pick("auto", x.half(), 5, 4, 16, 24) == "triton"
    assert pick("auto", x.float(), 5, 4, 16, 24) == "reference"
    assert pick("auto", x, 5, 4, 16, 20) == "reference"
    assert pick("auto", x, 5, 513, 16, 24) != "triton"
    assert pick("auto", x, 2**30, 4, 16, 24) != "triton"
    with pytest.raises(ValueError, match="multiplies bfloat16 or float16 here, not float32"):
        pick("triton", x.float(), 5, 4, 16, 24)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_run_where_the_tensors_are():
    want = _step(*_layer())
    got = _step(*_layer(device="cuda:1"))
    assert torch.cuda.current_device() == 0
    for a, b in zip(got, want, strict=True):
        assert a.device.index == 1
        assert torch.isfinite(a).all()
        assert a.shape == b.shape


def _last(rows, values):
    tensor = torch.zeros(rows, values.shape[1], device="cuda", dtype=values.dtype)
    tensor[-len(values) :] = values
    return tensor


def test_a_product_of_more_than_two_to_the_31_elements_ends_right():
    D, F, few = 2048, 2056, 64
    x, w, dy = _normal(few, D, seed=1), _normal(2, F, D, seed=2), _normal(few, F, seed=3)
    results = []
    for rows in (few, 2**20 + few):
        offsets = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
        leaves = [_last(rows, x).requires_grad_(), w.detach().requires_grad_()]
        y = grouped_mm(*leaves, offsets, impl="triton")
        dx, dw = torch.autograd.grad(y, leaves, _last(rows, dy))
        results.append((y.detach()[-few:].clone(), dx[-few:].clone(), dw))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)


def test_a_layer_of_more_than_two_to_the_31_elements_ends_right():
    few, K, E, D, H = 64, 2, 3, 2048, 1024
    x, dy = _normal(few, D, seed=1), _normal(few, D, seed=2)
    stacks = [_normal(E, 2 * H, D, seed=3, scale=D**-0.5), _normal(E, D, H, seed=4, scale=H**-0.5)]
    results = []
    for tokens in (few, 2**20 + few):
        ids = torch.tensor([2, 0], device="cuda").expand(tokens, K)
        leaves = [
            _last(tokens, x).requires_grad_(),
            torch.full((tokens, K), 0.5, device="cuda").requires_grad_(),
            *(stack.detach().requires_grad_() for stack in stacks),
        ]
        y = moe_mlp(leaves[0], ids, *leaves[1:], impl="triton")
        dx, ds, *dw = torch.autograd.grad(y, leaves, _last(tokens, dy))
        results.append((y.detach()[-few:].clone(), dx[-few:].clone(), ds[-few:].clone(), *dw))
        del y, dx, ds, leaves
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)
