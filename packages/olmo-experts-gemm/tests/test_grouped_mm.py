"""The grouped product and its gradients, against a float64 loop over the rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_experts_gemm import _torch_grouped_mm, grouped_mm
from olmo_experts_gemm._grouped_mm import (
    add_grouped_outer_op,
    grouped_mm_main_grad_op,
    grouped_mm_op,
    grouped_outer_op,
)

IMPLS = ("reference", "torch")
NAN = float("nan")


def _operands(counts, D, F, tail=0, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = sum(counts) + tail
    x = torch.randn(rows, D, generator=generator, dtype=torch.float64).to(dtype)
    w = torch.randn(len(counts), F, D, generator=generator, dtype=torch.float64).to(dtype)
    dy = torch.randn(rows, F, generator=generator, dtype=torch.float64).to(dtype)
    return {"x": x, "w": w}, dy


def _product(offsets, impl="reference"):
    return lambda x, w: grouped_mm(x, w, offsets, impl=impl)


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=7),
    D=st.integers(1, 9),
    F=st.integers(1, 9),
    tail=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)
def test_any_counts_and_sizes_give_the_product_and_both_gradients(
    oracle, run, assert_same, counts, D, F, tail, seed
):
    tensors, dy = _operands(counts, D, F, tail, seed=seed)
    want = run(lambda x, w: oracle.grouped_mm(x, w, counts), tensors, dy, torch.float64)
    rows = sum(counts)
    poisoned, poisoned_dy = tensors["x"].clone(), dy.clone()
    poisoned[rows:], poisoned_dy[rows:] = NAN, NAN
    got = run(_product(oracle.ends(counts)), {**tensors, "x": poisoned}, poisoned_dy, torch.float64)
    assert_same(got, want, 1e-13)
    assert (got["y"][rows:] == 0).all()
    assert (got["x"][rows:] == 0).all()
    for expert, count in enumerate(counts):
        if count == 0:
            assert (got["w"][expert] == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "counts", [[5, 0, 3, 0, 1], [0, 4, 0, 0, 7], [0, 0, 6], [9, 0], [162, 0, 257, 46, 0, 83]]
)
def test_an_expert_without_rows_gets_zero_and_the_others_their_own(
    oracle, run, assert_same, impl, counts
):
    tensors, dy = _operands(counts, 8, 12, tail=3, dtype=torch.float32)
    rows = sum(counts)
    tensors["x"][rows:], dy[rows:] = 1e30, NAN
    got = run(_product(oracle.ends(counts), impl), tensors, dy, torch.float32)
    tensors["x"][rows:], dy[rows:] = 0, 0
    want = run(lambda x, w: oracle.grouped_mm(x, w, counts), tensors, dy, torch.float64)
    # Expert by expert: a sum over the whole stack hides a wrong small one behind a right large one.
    for expert, count in enumerate(counts):
        assert_same({"dw": got["w"][expert]}, {"dw": want["w"][expert]}, 2e-6 if count else 0.0)
    assert_same(got, want, 2e-6)
    assert (got["y"][rows:] == 0).all()
    assert (got["x"][rows:] == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("counts", "tail"), [([0], 0), ([0, 0, 0], 0), ([0, 0], 7), ([0], 5)])
def test_without_any_row_every_gradient_exists_and_is_zero(oracle, run, impl, counts, tail):
    tensors, dy = _operands(counts, 8, 4, tail, dtype=torch.float32)
    tensors["x"][:], dy[:] = NAN, NAN
    got = run(_product(oracle.ends(counts), impl), tensors, dy, torch.float32)
    for name, shape in {"y": (tail, 4), "x": (tail, 8), "w": (len(counts), 4, 8)}.items():
        assert got[name].shape == shape
        assert (got[name] == 0).all(), name


@pytest.mark.parametrize("impl", IMPLS)
def test_one_expert_in_a_longer_buffer_is_its_rows_alone(oracle, run, impl):
    tensors, dy = _operands([100], 8, 8, tail=28, dtype=torch.float32)
    tensors["x"][100:], dy[100:] = NAN, 1e30
    padded = run(_product(oracle.ends([100]), impl), tensors, dy, torch.float32)
    exact_tensors = {**tensors, "x": tensors["x"][:100]}
    exact = run(_product(oracle.ends([100]), impl), exact_tensors, dy[:100], torch.float32)
    assert torch.equal(padded["w"], exact["w"])
    assert torch.equal(padded["y"][:100], exact["y"])
    assert torch.equal(padded["x"][:100], exact["x"])


@pytest.mark.parametrize("impl", IMPLS)
def test_weight_gradients_add_over_microbatches_and_start_again_from_zero(oracle, run, impl):
    batches = [[4, 3, 0], [1, 0, 5], [2, 6, 0]]
    tensors, _ = _operands(batches[0], 8, 4, dtype=torch.float32)
    w = tensors["w"].clone().requires_grad_()
    for _ in range(2):
        parts = []
        for seed, counts in enumerate(batches):
            part, dy = _operands(counts, 8, 4, dtype=torch.float32, seed=seed)
            offsets = oracle.ends(counts)
            grouped_mm(part["x"], w, offsets, impl=impl).backward(dy)
            parts.append(run(_product(offsets, impl), {**part, "w": w}, dy, torch.float32)["w"])
        assert torch.equal(w.grad, (parts[0] + parts[1]) + parts[2])
        assert torch.equal(w.grad[2], parts[1][2])
        w.grad = None


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "change",
    [
        lambda x, w: (x, w.mT.contiguous().mT),
        lambda x, w: (x, torch.stack([w, w], 1)[:, 0]),
        lambda x, w: (x, torch.cat([w[:, :4], w], 1)[:, 4:]),
        lambda x, w: (x, torch.cat([w.new_zeros(1), w.flatten()])[1:].view_as(w)),
        lambda x, w: (x.t().contiguous().t(), w),
        lambda x, w: (torch.cat([x, x], 1)[:, 8:], w),
        lambda x, w: (torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x), w),
    ],
    ids=["w.mT", "w[::2]", "w[:, 4:]", "w at offset 1", "x.t", "x[:, 8:]", "x at offset 1"],
)
def test_views_give_what_dense_operands_give(oracle, impl, change):
    tensors, dy = _operands([3, 0, 6], 8, 12, dtype=torch.float32)
    x, w = change(tensors["x"], tensors["w"])
    plain = [x.clone(memory_format=torch.contiguous_format), w.clone().contiguous()]
    results = []
    for pair in ([x, w], plain):
        leaves = [tensor.detach().requires_grad_() for tensor in pair]
        y = grouped_mm(*leaves, oracle.ends([3, 0, 6]), impl=impl)
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    for view, want in zip(*results, strict=True):
        torch.testing.assert_close(view, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_one_row_and_an_expanded_gradient_are_accepted(oracle, impl):
    x = torch.ones(1, 1).expand(1, 8).requires_grad_()
    w = torch.arange(32.0).view(1, 4, 8).requires_grad_()
    grouped_mm(x, w, oracle.ends([1]), impl=impl).sum().backward()
    assert torch.equal(x.grad, w.detach().sum(1))
    assert (w.grad == 1).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_errs_at_most_twice_as_much_as_plain_torch(
    oracle, run, assert_twice_as_good, impl, dtype
):
    counts, D, F = [63, 0, 1, 100], 96, 64
    offsets = oracle.ends(counts)
    tensors, dy = _operands(counts, D, F, dtype=dtype)

    def plain(x, w):
        return torch.cat([a @ b.t() for a, b in zip(x.split(counts), w, strict=True)])

    exact = run(lambda x, w: oracle.grouped_mm(x, w, counts), tensors, dy, torch.float64)
    got = run(_product(offsets, impl), tensors, dy, dtype)
    assert {value.dtype for value in got.values()} == {dtype}
    assert_twice_as_good(got, run(plain, tensors, dy, dtype), exact)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_main_grad_takes_three_microbatches_in_the_order_of_a_pipeline(oracle, impl):
    """Expert 2 has rows in the second one alone; the buffer changes while two forwards wait."""
    batches = [[4, 3, 0], [1, 0, 5], [2, 6, 0]]
    w = _operands(batches[0], 8, 4, dtype=torch.float32)[0]["w"].requires_grad_()
    buffer, parts = torch.zeros(3, 4, 8), []
    for seed, counts in enumerate(batches):
        tensors, dy = _operands(counts, 8, 4, dtype=torch.float32, seed=seed)
        parts.append((tensors["x"].requires_grad_(), oracle.ends(counts), dy))
    want = [
        torch.autograd.grad(grouped_mm(x, w, ends, impl=impl), (x, w), dy) for x, ends, dy in parts
    ]

    def forward(x, ends, _):
        return grouped_mm(x, w, ends, main_grad_EFD=buffer, impl=impl)

    for _ in range(2):
        first, second = forward(*parts[0]), forward(*parts[1])
        first.backward(parts[0][2])
        third = forward(*parts[2])
        second.backward(parts[1][2])
        kept = buffer[2].clone()
        third.backward(parts[2][2])
        assert w.grad is None
        assert torch.equal(buffer, (want[0][1] + want[1][1]) + want[2][1])
        assert torch.equal(buffer[2], kept)
        for (x, *_), (dx, _) in zip(parts, want, strict=True):
            assert torch.equal(x.grad, dx)
            x.grad = None
        buffer.zero_()
    y = forward(*parts[0])
    torch.autograd.grad(y, parts[0][0], parts[0][2])
    assert torch.equal(buffer, want[0][1])  # as the docstring says of a backward for `x` alone
    buffer.zero_()
    w.requires_grad_(False)
    forward(*parts[0]).backward(parts[0][2])
    assert (buffer == 0).all()


def test_a_main_grad_has_no_second_derivative_and_compiles(oracle):
    tensors, dy = _operands([2, 0, 3], 8, 4, dtype=torch.float32)
    x, w = (tensor.requires_grad_() for tensor in tensors.values())
    offsets, buffer = oracle.ends([2, 0, 3]), torch.zeros(3, 4, 8)
    want = torch.autograd.grad(grouped_mm(x, w, offsets), w, dy)[0]
    y = grouped_mm(x, w, offsets, main_grad_EFD=buffer)
    with pytest.raises(RuntimeError, match="`create_graph=True` must not meet a `main_grad`"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    assert (buffer == 0).all()
    compiled = torch.compile(grouped_mm, backend="aot_eager", fullgraph=True)
    compiled(x, w, offsets, main_grad_EFD=buffer).backward(dy)
    first, second = (compiled(x, w, offsets, main_grad_EFD=buffer.data) for _ in range(2))
    first.backward(dy)
    second.backward(dy)
    assert torch.equal(buffer, want + want + want)
    first, second = (compiled(x, w, offsets, main_grad_EFD=buffer) for _ in range(2))
    first.backward(dy)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward(dy)


def test_gradients_of_any_order_match_finite_differences(oracle):
    tensors, dy = _operands([2, 0, 1], 3, 2, tail=1)
    x, w = (tensor.requires_grad_() for tensor in tensors.values())
    offsets = oracle.ends([2, 0, 1])
    function = _product(offsets)
    assert torch.autograd.gradcheck(function, (x, w))
    assert torch.autograd.gradgradcheck(function, (x, w), (dy.requires_grad_(),))


@pytest.mark.parametrize("impl", IMPLS)
def test_operators_keep_the_rules_of_torch(oracle, impl):
    tensors, dy = _operands([2, 0, 3], 8, 4, tail=1, dtype=torch.float32)
    x, w, dy = (t.requires_grad_() for t in (*tensors.values(), dy))
    offsets = oracle.ends([2, 0, 3])
    for operator, pair in ((grouped_mm_op, (x, w)), (grouped_outer_op, (dy, x))):
        torch.library.opcheck(operator, (*pair, offsets, impl))
    buffer = torch.zeros(3, 4, 8)
    torch.library.opcheck(grouped_mm_main_grad_op, (x, w, offsets, buffer, impl))
    pair = (dy.detach(), x.detach())
    torch.library.opcheck(add_grouped_outer_op, (buffer, *pair, offsets, impl))


def test_compiles_into_one_graph(oracle):
    tensors, dy = _operands([2, 0, 3], 8, 4, dtype=torch.float32)
    x, w = (tensor.requires_grad_() for tensor in tensors.values())
    offsets = oracle.ends([2, 0, 3])
    compiled = torch.compile(grouped_mm, backend="aot_eager", fullgraph=True)
    got = compiled(x, w, offsets)
    want = grouped_mm(x, w, offsets)
    assert torch.equal(got, want)
    for a, b in zip(
        torch.autograd.grad(got, (x, w), dy), torch.autograd.grad(want, (x, w), dy), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("frozen", ["x", "w"])
def test_a_frozen_operand_costs_no_product(oracle, monkeypatch, frozen):
    tensors, dy = _operands([2, 3], 8, 4, dtype=torch.float32)
    leaves = {name: t.requires_grad_(name != frozen) for name, t in tensors.items()}
    y = grouped_mm(*leaves.values(), oracle.ends([2, 3]), impl="torch")
    calls = []
    for name in ("grouped_mm", "grouped_outer"):
        product = getattr(_torch_grouped_mm, name)
        monkeypatch.setattr(
            _torch_grouped_mm,
            name,
            lambda *a, name=name, product=product: calls.append(name) or product(*a),
        )
    y.backward(dy)
    assert calls == (["grouped_outer"] if frozen == "x" else ["grouped_mm"])
    assert leaves[frozen].grad is None


def test_auto_is_the_reference_on_cpu(oracle):
    counts = [5, 0, 11]
    tensors, _ = _operands(counts, 8, 8, dtype=torch.bfloat16)
    auto = grouped_mm(*tensors.values(), oracle.ends(counts))
    assert torch.equal(auto, grouped_mm(*tensors.values(), oracle.ends(counts), impl="reference"))
