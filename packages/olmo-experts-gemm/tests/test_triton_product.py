"""The grouped product of the Triton kernels, on a GPU, and on a CPU in Triton's interpreter.

`test_interpreter.py` runs this file there once, by float16 and float32, at small sizes.
"""

import os

import pytest
import torch
from olmo_experts_gemm import grouped_mm
from olmo_experts_gemm._grouped_mm import (
    add_grouped_outer_op,
    grouped_mm_main_grad_op,
    grouped_mm_op,
    grouped_outer_op,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAN = float("nan")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
    # numpy on the interpreter, which also multiplies what lies past an expert's rows.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]
LOW = torch.float16 if INTERPRETED else torch.bfloat16
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
COUNTS = [[0, 9, 0, 0, 34, 1, 0], [5], [0, 0, 33]]
if not INTERPRETED:
    COUNTS = [[0, 63, 0, 0, 300, 1, 129, 0], [200], [0, 0, 513], [1] * 512]


def _operands(counts, device, tail=0, dtype=LOW, D=40, F=72, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = sum(counts) + tail
    shapes = {"x": (rows, D), "w": (len(counts), F, D), "dy": (rows, F)}
    made = {
        name: torch.randn(*shape, generator=generator).to(device, dtype)
        for name, shape in shapes.items()
    }
    return {"x": made["x"], "w": made["w"]}, made["dy"]


def _product(offsets, impl="triton", **options):
    return lambda x, w: grouped_mm(x, w, offsets, impl=impl, **options)


def _on_cpu(tensors):
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tail", [0, 7])
@pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: f"E={len(counts)}")
def test_matches_float64_whatever_lies_past_the_end(
    oracle, run, assert_twice_as_good, device, counts, tail, dtype
):
    tensors, dy = _operands(counts, device, tail, dtype)
    rows = sum(counts)
    exact = run(
        lambda x, w: oracle.grouped_mm(x, w, counts), _on_cpu(tensors), dy.cpu(), torch.float64
    )

    def plain(x, w):
        y = torch.cat([a @ b.t() for a, b in zip(x[:rows].split(counts), w, strict=True)])
        return torch.nn.functional.pad(y, (0, 0, 0, tail))

    reference = _on_cpu(run(plain, tensors, dy, dtype))
    tensors["x"][rows:], dy[rows:] = NAN, NAN
    got = _on_cpu(run(_product(oracle.ends(counts, device)), tensors, dy, dtype))
    assert {value.dtype for value in got.values()} == {dtype}
    assert_twice_as_good(got, reference, exact, largest=4.0 if INTERPRETED else 2.0)
    for name in ("y", "x"):
        assert (got[name][rows:] == 0).all(), name
    for expert, count in enumerate(counts):
        assert count or (got["w"][expert] == 0).all(), expert


@pytest.mark.parametrize("rows", [0, 5])
def test_without_any_routed_row_everything_is_zero(oracle, run, device, rows):
    tensors, dy = _operands([0, 0, 0], device, tail=rows)
    tensors["x"][:], dy[:] = NAN, NAN
    got = run(_product(oracle.ends([0, 0, 0], device)), tensors, dy, LOW)
    assert got["y"].shape == (rows, 72)
    assert got["w"].shape == (3, 72, 40)
    assert all((value == 0).all() for value in got.values())


@pytest.mark.parametrize(
    "change",
    [
        lambda x, w, dy: (x, w.mT.contiguous().mT, dy),
        lambda x, w, dy: (x, torch.stack([w, w], 1)[:, 0], dy),
        lambda x, w, dy: (x, torch.cat([w.new_zeros(1), w.flatten()])[1:].view_as(w), dy),
        lambda x, w, dy: (torch.cat([x, x], 1)[:, 40:], w, dy),
        lambda x, w, dy: (torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x), w, dy),
        lambda x, w, dy: (x.t().contiguous().t(), w, dy.t().contiguous().t()),
        lambda x, w, dy: (x, w, dy[:1].expand_as(dy)),
    ],
    ids=["w.mT", "w[:, ::2]", "w at 1", "x[:, 40:]", "x at 1", "x.t", "dy expanded"],
)
def test_views_give_the_bits_of_dense_operands(oracle, device, change):
    offsets = oracle.ends([3, 0, 6], device)
    tensors, dy = _operands([3, 0, 6], device, tail=2)
    views = change(tensors["x"], tensors["w"], dy)
    results = []
    for x, w, g in (views, [view.clone(memory_format=torch.contiguous_format) for view in views]):
        leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
        y = grouped_mm(*leaves, offsets, impl="triton")
        results.append((y, *torch.autograd.grad(y, leaves, g)))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_dense_weights_are_copied_in_neither_orientation(oracle, device, monkeypatch):
    from olmo_experts_gemm import _triton_product
    from olmo_experts_gemm._triton import row_product

    seen, multiply = [], row_product.row_product

    def spy(x, w, offsets, **options):
        seen.append((w.data_ptr(), options["transposed"]))
        return multiply(x, w, offsets, **options)

    monkeypatch.setattr(row_product, "row_product", spy)
    tensors, _ = _operands([3, 4], device)
    w, offsets = tensors["w"], oracle.ends([3, 4], device)
    _triton_product.grouped_mm(tensors["x"], w, offsets)
    _triton_product.grouped_mm(tensors["x"], w.mT.contiguous().mT, offsets)
    _triton_product.grouped_mm(torch.ones(7, 72, device=device, dtype=LOW), w.mT, offsets)
    assert [transposed for _, transposed in seen] == [False, True, True]
    assert (seen[0][0], seen[2][0]) == (w.data_ptr(), w.data_ptr())


def test_second_derivatives_are_those_of_the_reference(oracle, assert_same, device):
    tensors, dy = _operands([3, 0, 6], device, dtype=torch.float32 if INTERPRETED else LOW)
    offsets, results = oracle.ends([3, 0, 6], device), []
    for impl, place, dtype in (("triton", device, dy.dtype), ("reference", "cpu", torch.float64)):
        leaves = [t.detach().to(place, dtype).requires_grad_() for t in (*tensors.values(), dy)]
        x, w, g = leaves
        y = grouped_mm(x, w, offsets.to(place), impl=impl)
        first = torch.autograd.grad(y, (x, w), g, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), leaves)
        results.append(dict(zip("xwg", (t.detach().cpu() for t in second), strict=True)))
    assert_same(*results, 1e-5 if INTERPRETED else 0.03)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, of jvp
def test_forward_mode_is_refused(oracle, device):
    tensors, _ = _operands([3, 4], device)
    x, w = tensors.values()
    call = _product(oracle.ends([3, 4], device))
    with pytest.raises(NotImplementedError, match="Forward-mode derivatives"):
        torch.func.jvp(lambda x: call(x, w), (x,), (x,))
    with pytest.raises(NotImplementedError, match="Forward-mode derivatives"):
        torch.func.jvp(lambda w: call(x, w), (w,), (w,))


@pytest.mark.parametrize("aligned", [True, False])
def test_a_main_grad_takes_three_microbatches_in_the_order_of_a_pipeline(oracle, device, aligned):
    batches = [[4, 3, 0], [1, 0, 35], [2, 6, 0]]
    dtype = torch.float32 if INTERPRETED else LOW
    w = _operands(batches[0], device, dtype=dtype)[0]["w"].requires_grad_()
    buffer = torch.zeros(w.numel() + 1, device=device)[0 if aligned else 1 :][: w.numel()]
    buffer = buffer.view_as(w)
    parts = []
    for seed, counts in enumerate(batches):
        tensors, dy = _operands(counts, device, dtype=dtype, seed=seed)
        parts.append((tensors["x"].requires_grad_(), oracle.ends(counts, device), dy))
    want = sum(
        torch.autograd.grad(grouped_mm(x, w, ends, impl="triton"), w, dy)[0].double()
        for x, ends, dy in parts
    )
    for _ in range(2):
        live = [grouped_mm(x, w, e, main_grad_EFD=buffer, impl="triton") for x, e, _ in parts[:2]]
        live[0].backward(parts[0][2])
        x, ends, _ = parts[2]
        live.append(grouped_mm(x, w, ends, main_grad_EFD=buffer, impl="triton"))
        live[1].backward(parts[1][2])
        kept = buffer[2].clone()
        live[2].backward(parts[2][2])
        assert w.grad is None
        error = (buffer.double() - want).abs().max() / want.abs().max()
        assert error < (1e-6 if INTERPRETED else 0.01)
        assert torch.equal(buffer[2], kept)
        assert (kept != 0).any()
        buffer.zero_()


def test_runs_agree_bit_for_bit(oracle, run, device):
    tensors, dy = _operands(COUNTS[0], device, tail=3)
    function = _product(oracle.ends(COUNTS[0], device))
    first = run(function, tensors, dy, LOW)
    for _ in range(2 if INTERPRETED else 100):
        again = run(function, tensors, dy, LOW)
        assert all(torch.equal(again[name], value) for name, value in first.items())


def test_operators_keep_the_rules_of_torch(oracle, device):
    tensors, dy = _operands([2, 0, 3], device, tail=1)
    x, w, dy = (t.requires_grad_() for t in (*tensors.values(), dy))
    offsets, buffer = oracle.ends([2, 0, 3], device), torch.zeros_like(w, dtype=torch.float32)
    for operator, pair in ((grouped_mm_op, (x, w)), (grouped_outer_op, (dy, x))):
        torch.library.opcheck(operator, (*pair, offsets, "triton"))
    torch.library.opcheck(grouped_mm_main_grad_op, (x, w, offsets, buffer.detach(), "triton"))
    plain = (dy.detach(), x.detach(), offsets, "triton")
    torch.library.opcheck(add_grouped_outer_op, (buffer.detach(), *plain))


def test_compiles_into_one_graph(oracle, run, device):
    tensors, dy = _operands([2, 0, 3], device)
    function = _product(oracle.ends([2, 0, 3], device))
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    want = run(function, tensors, dy, LOW)
    got = run(compiled, tensors, dy, LOW)
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_the_limit_of_rows_is_that_of_the_descriptors():
    from olmo_experts_gemm import _triton_product
    from olmo_experts_gemm._triton import ragged

    assert _triton_product.MAX_ROWS == ragged.MAX_ROWS
