"""torch's product on CUDA: right, clean past the end, and without a host sync."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from olmo_experts_gemm import grouped_mm, moe_mlp, swiglu_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]
NAN = float("nan")
COUNTS = [0, 63, 0, 0, 100, 1, 129, 0]


@contextmanager
def _no_host_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _normal(*shape, seed=0, scale=1.0):
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(*shape, generator=generator, device="cuda") * scale
    return values.to(torch.bfloat16)


def _operands(tail, D=136, F=72):
    rows = sum(COUNTS) + tail
    x, dy = _normal(rows, D, seed=1), _normal(rows, F, seed=2)
    return {"x": x, "w": _normal(len(COUNTS), F, D, seed=3)}, dy


@pytest.mark.parametrize("tail", [0, 7, 300])
def test_torch_product_matches_float64_whatever_lies_past_the_end(
    oracle, run, assert_twice_as_good, tail
):
    tensors, dy = _operands(tail)
    rows, offsets = sum(COUNTS), oracle.ends(COUNTS, "cuda")
    exact = run(
        lambda x, w: oracle.grouped_mm(x, w, COUNTS),
        {name: value.cpu() for name, value in tensors.items()},
        dy.cpu(),
        torch.float64,
    )
    exact = {name: value.cuda() for name, value in exact.items()}

    def plain(x, w):
        parts = x[:rows].split(COUNTS)
        y = torch.cat([a @ b.t() for a, b in zip(parts, w, strict=True)])
        return torch.nn.functional.pad(y, (0, 0, 0, tail))

    reference = run(plain, tensors, dy, torch.bfloat16)
    tensors["x"][rows:], dy[rows:] = NAN, NAN
    for impl in ("torch", "reference", "auto"):
        got = run(
            lambda x, w, impl=impl: grouped_mm(x, w, offsets, impl=impl),
            tensors,
            dy,
            torch.bfloat16,
        )
        for name in ("y", "x"):
            assert (got[name][rows:] == 0).all(), (impl, name)
            exact[name][rows:] = 0
        assert_twice_as_good(got, reference, exact)
        for expert, count in enumerate(COUNTS):
            assert count or (got["w"][expert] == 0).all(), (impl, expert)


@pytest.mark.parametrize("rows", [0, 5])
def test_torch_product_without_any_routed_row_gives_zeros(oracle, run, rows):
    tensors = {"x": _normal(rows, 16), "w": _normal(3, 8, 16)}
    tensors["x"][:] = NAN
    dy = torch.full((rows, 8), NAN, device="cuda", dtype=torch.bfloat16)
    offsets = oracle.ends([0, 0, 0], "cuda")
    got = run(lambda x, w: grouped_mm(x, w, offsets, impl="torch"), tensors, dy, torch.bfloat16)
    assert all((value == 0).all() for value in got.values())
    assert got["w"].shape == (3, 8, 16)


@pytest.mark.parametrize("view", ["w.mT", "w at offset 1", "x.t", "dy expanded"])
def test_torch_product_copies_what_its_kernel_cannot_read(oracle, view):
    tensors, dy = _operands(tail=4)
    x, w = tensors["x"], tensors["w"]
    if view == "w.mT":
        w = w.mT.contiguous().mT
    elif view == "w at offset 1":
        w = torch.cat([w.new_zeros(1), w.flatten()])[1:].view_as(w)
    elif view == "x.t":
        x = x.t().contiguous().t()
    else:
        dy = dy[:1].expand_as(dy)
    offsets = oracle.ends(COUNTS, "cuda")
    results = []
    for a, b, g in ((x, w, dy), (tensors["x"], tensors["w"], dy.contiguous())):
        leaves = [a.detach().requires_grad_(), b.detach().requires_grad_()]
        y = grouped_mm(*leaves, offsets, impl="torch")
        results.append((y, *torch.autograd.grad(y, leaves, g)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_torch_product_never_waits_for_the_device(oracle):
    tensors, dy = _operands(tail=9)
    x, w = (tensor.requires_grad_() for tensor in tensors.values())
    offsets = oracle.ends(COUNTS, "cuda")
    grouped_mm(x, w, offsets, impl="torch").backward(dy)
    with _no_host_sync():
        grouped_mm(x, w, offsets, impl="torch").backward(dy)
    with pytest.raises(RuntimeError, match="synchronizing"), _no_host_sync():
        grouped_mm(x, w, offsets, impl="reference")


def test_a_whole_layer_never_waits_for_the_device_and_repeats_bit_for_bit():
    T, K, E, D, H = 131, 2, 8, 64, 32
    ids = torch.rand(T, E, device="cuda").argsort(1)[:, :K]
    ids[::7, 1] = -1
    leaves = [
        _normal(T, D, seed=1),
        torch.rand(T, K, device="cuda"),
        _normal(E, 2 * H, D, seed=2, scale=D**-0.5),
        _normal(E, D, H, seed=3, scale=H**-0.5),
    ]
    x, weights, w_gate_up, w_down = (leaf.requires_grad_() for leaf in leaves)
    dy = _normal(T, D, seed=4)

    def step():
        y = moe_mlp(x, ids, weights, w_gate_up, w_down)
        return y, *torch.autograd.grad(y, leaves, dy)

    first = step()
    with _no_host_sync():
        runs = [step() for _ in range(5)]
    for again in runs:
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert (first[2][ids < 0] == 0).all()

    host = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    y = moe_mlp(host[0], ids.cpu(), *host[1:])
    want = (y, *torch.autograd.grad(y, host, dy.cpu().double()))
    for got, exact in zip(first, want, strict=True):
        scale = exact.abs().max()
        assert (got.cpu().double() - exact).abs().max() <= 0.03 * scale


def test_a_product_of_the_caller_never_waits_for_the_device(oracle):
    x = _normal(sum(COUNTS) + 5, 64).requires_grad_()
    w_gate_up, w_down = _normal(8, 64, 64, scale=0.1), _normal(8, 64, 32, scale=0.1)
    offsets = oracle.ends(COUNTS, "cuda")

    def product(rows, stack, ends):
        return grouped_mm(rows, stack, ends, impl="torch")

    swiglu_experts(x, w_gate_up, w_down, offsets, matmul=product).sum().backward()
    with _no_host_sync():
        y = swiglu_experts(x, w_gate_up, w_down, offsets, matmul=product)
        y.backward(torch.ones_like(y))


def test_torch_product_refuses_what_would_wait_for_the_device(oracle):
    offsets = oracle.ends([1, 2], "cuda")
    x, w = torch.ones(3, 8, device="cuda"), torch.ones(2, 8, 8, device="cuda")
    with pytest.raises(ValueError, match="its CUDA kernel multiplies bfloat16, not float32"):
        grouped_mm(x, w, offsets, impl="torch")
    assert (grouped_mm(x, w, offsets) == 8).all()


def test_last_rows_of_more_than_two_to_the_31_elements_are_right(run):
    rows, D = 2**20 + 64, 2048
    x = torch.zeros(rows, D, device="cuda", dtype=torch.bfloat16)
    x[-64:] = _normal(64, D, seed=1)
    w = _normal(2, 8, D, seed=2)
    dy = torch.zeros(rows, 8, device="cuda", dtype=torch.bfloat16)
    dy[-64:] = _normal(64, 8, seed=3)

    def last_rows(x, dy):
        offsets = torch.tensor([0, len(x)], dtype=torch.int32, device="cuda")
        got = run(
            lambda x, w: grouped_mm(x, w, offsets, impl="torch"), {"x": x, "w": w}, dy, x.dtype
        )
        return got["y"][-64:], got["x"][-64:], got["w"]

    for got, want in zip(last_rows(x, dy), last_rows(x[-64:], dy[-64:]), strict=True):
        torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)
