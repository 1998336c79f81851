"""The products of the kernels, against the exact ones of the quantised values in float64.

Run on a GPU; on a CPU `test_interpreter.py` runs this file once in Triton's interpreter, where the
dequantised operands are float32, because the interpreter gets bfloat16 wrong.
"""

import pytest
import torch
from mx_kernel_setting import DEVICE, INTERPRETED, KERNEL_MARKS
from olmo_mxfp8 import (
    MXRecipe,
    MXTensor,
    WeightCache,
    dequantize,
    mx_grouped_mm,
    mx_linear,
    mx_swiglu_experts,
    quantize,
    scaled_grouped_mm,
    scaled_mm,
)

pytestmark = KERNEL_MARKS
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.x")
# The interpreter does not know Hopper's units.
IMPLS = ["dequantise", *([] if INTERPRETED else [pytest.param("coarse", marks=needs_hopper)])]
SIZES = [(5, 32, 27), (0, 5, 3), (5, 0, 0, 3), (0, 0), (7,), (33, 31, 0, 140), (1, 1, 1)]
OUT = torch.float32 if INTERPRETED else torch.bfloat16


def _offsets(sizes):
    return torch.tensor(sizes).cumsum(0).int().to(DEVICE)


def _quantised(impl, x, w):
    """Both operands, on the device, with the scales that `impl` takes."""
    coarse = impl == "coarse"
    return (
        quantize(x, granularity=128 if coarse else 32).to(DEVICE),
        quantize(w, granularity="128x128" if coarse else 32).to(DEVICE),
    )


def _exact(a, b):
    """The product of the quantised values, and of their magnitudes, in float64 on the CPU."""
    a, b = (dequantize(t.to("cpu"), torch.float64) for t in (a, b))
    return a @ b.mT, a.abs() @ b.mT.abs()


def _rows_of(t, first, last):
    return MXTensor(t.data[first:last], t.scales[first:last], t.dim, t.element, t.granularity)


def _expert_of(t, e):
    return MXTensor(t.data[e], t.scales[e], t.dim - 1, t.element, t.granularity)


def _assert_near(got, a, b, impl):
    """Within the bound of the implementation: a float32 sum, or Hopper's short FP8 sums."""
    exact, magnitude = _exact(a, b)
    step = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[got.dtype]
    sums = 2.0**-10 if impl == "coarse" else a.shape[-1] * 2.0**-24
    assert ((got.cpu().double() - exact).abs() <= sums * magnitude + step * exact.abs()).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sizes", SIZES)
def test_groups_of_any_size_and_a_tail_that_reaches_nothing(impl, sizes):
    total, spare = sum(sizes), 7
    x, w = torch.randn(total + spare, 256), torch.randn(len(sizes), 128, 256)
    a, b = _quantised(impl, x, w)
    a.data.view(torch.uint8)[total:] = 0x7F  # NaN
    a.scales[total:] = 255
    got = scaled_grouped_mm(a, b, _offsets(sizes), out_dtype=torch.float32, impl=impl)
    assert got.shape == (total + spare, 128)
    assert (got[total:] == 0).all()
    start = 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        _assert_near(got[rows], _rows_of(a, start, start + size), _expert_of(b, e), impl)
        start += size


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("elements", [("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e5m2", "e5m2")])
def test_element_formats_mix(impl, elements):
    coarse = impl == "coarse"
    a = quantize(torch.randn(40, 128), element=elements[0], granularity=128 if coarse else 32)
    b = quantize(
        torch.randn(256, 128), element=elements[1], granularity="128x128" if coarse else 32
    )
    got = scaled_mm(a.to(DEVICE), b.to(DEVICE), out_dtype=OUT, impl=impl)
    _assert_near(got, a, b, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_scales_of_every_size_multiply(impl):
    """Each step of each row has its own power of two, and every tile of the weights."""
    x = torch.randn(70, 384) * torch.exp2(
        torch.randint(-30, 30, (70, 3)).float()
    ).repeat_interleave(128, 1)
    w = torch.randn(2, 256, 384)
    w *= (
        torch.exp2(torch.randint(-30, 30, (2, 2, 3)).float())
        .repeat_interleave(128, 1)
        .repeat_interleave(128, 2)
    )
    a, b = _quantised(impl, x, w)
    got = scaled_grouped_mm(a, b, _offsets((37, 33)), out_dtype=torch.float32, impl=impl)
    for e, (first, last) in enumerate([(0, 37), (37, 70)]):
        _assert_near(got[first:last], _rows_of(a, first, last), _expert_of(b, e), impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_ends_of_the_scales(impl):
    """Byte 0 is 2^-127 and no zero; NaN stays in its row and its expert; zeros never make NaN."""
    tiny, large = torch.full((4, 128), 2.0**-127), torch.full((1, 128, 128), 2.0**120)
    tiny[1] = 0
    tiny[2, 5] = torch.nan
    a, b = _quantised(impl, tiny, large)
    assert a.scales[0].tolist() == [0] * 4
    got = scaled_grouped_mm(a, b, _offsets((4,)), out_dtype=torch.float32, impl=impl).cpu()
    assert (got[[0, 3]] == 1).all()
    assert (got[1] == 0).all()
    assert got[2].isnan().all()
    huge, huge_w = torch.full((2, 128), 2.0**120), torch.full((1, 128, 128), 2.0**120)
    huge[1] = 0
    huge[1, 1], huge_w[0, :, 1] = 2.0**120, 0  # every product of the row is 0, its scale is not
    a, b = _quantised(impl, huge, huge_w)
    got = scaled_grouped_mm(a, b, _offsets((2,)), out_dtype=torch.float32, impl=impl).cpu()
    assert (got[0] == torch.inf).all()
    assert (got[1] == 0).all()
    w = torch.ones(2, 128, 128)
    w[1, 3, 9] = torch.inf
    a, b = _quantised(impl, torch.ones(4, 128), w)
    got = scaled_grouped_mm(a, b, _offsets((2, 4 - 2)), out_dtype=torch.float32, impl=impl).cpu()
    assert got[:2].isfinite().all()
    assert got[2:, 3].isnan().all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("zero", ["x", "w", "dy"])
def test_zeros_make_zeros(impl, zero):
    """Forward and backward of an operand of zeros: no NaN, and 0 in what is a product with it."""
    made = {"x": torch.randn(40, 128), "w": torch.randn(2, 128, 128), "dy": torch.randn(40, 128)}
    made[zero].zero_()
    recipe = MXRecipe(granularity=128 if impl == "coarse" else 32, weight_grad="mxfp8", impl=impl)
    operands = [t.to(DEVICE) for t in made.values()]
    got = _run(mx_grouped_mm, *operands, _offsets((23, 17)), recipe=recipe)
    for name, sources, value in zip(
        ("y", "dx", "dw"), ("xw", ("dy", "w"), ("dy", "x")), got, strict=True
    ):
        assert value.isfinite().all(), name
        assert (value == 0).all() == (zero in sources), name


def test_output_widths_that_no_tile_divides():
    a, b = _quantised("dequantise", torch.randn(9, 96), torch.randn(40, 96))
    _assert_near(scaled_mm(a, b, out_dtype=OUT, impl="dequantise"), a, b, "dequantise")


def test_operands_of_any_strides_and_offset():
    a, b = _quantised("dequantise", torch.randn(8, 128), torch.randn(16, 128))
    want = scaled_mm(a, b, out_dtype=OUT, impl="dequantise")
    odd = torch.cat([a.data.view(torch.uint8).new_zeros(1), a.data.view(torch.uint8).flatten()])
    for data in (a.data.T.contiguous().T, odd[1:].view(8, 128).view(a.data.dtype)):
        moved = MXTensor(data, a.scales.T.contiguous().T, 1, "e4m3")
        assert torch.equal(scaled_mm(moved, b, out_dtype=OUT, impl="dequantise"), want)


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_to_multiply(impl):
    a, b = _quantised(impl, torch.zeros(0, 128), torch.zeros(2, 128, 128))
    assert scaled_grouped_mm(a, b, _offsets((0, 0)), impl=impl).shape == (0, 128)


def _run(function, x, w, dy, *arguments, **options):
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = function(x, w, *arguments, **options)
    return y.detach(), *torch.autograd.grad(y, (x, w), dy)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("input_grad", ["mxfp8", "high"])
@pytest.mark.parametrize("weight_grad", ["mxfp8", "high"])
def test_small_integers_have_exact_products_and_gradients(impl, input_grad, weight_grad):
    sizes, spare = (37, 0, 23), 10
    x, w, dy = (
        torch.randint(-7, 8, shape).float()
        for shape in ((60 + spare, 128), (3, 256, 128), (60 + spare, 256))
    )
    x[60:], dy[60:] = torch.nan, torch.inf
    recipe = MXRecipe(
        granularity=128 if impl == "coarse" else 32,
        input_grad=input_grad,
        weight_grad=weight_grad,
        impl=impl,
    )
    operands = [t.to(DEVICE) for t in (x, w, dy)]
    got = _run(mx_grouped_mm, *operands, _offsets(sizes), recipe=recipe)
    x, w, dy = x.double(), w.double(), dy.double()
    first, third = slice(0, 37), slice(37, 60)
    zeros = torch.zeros(spare, 256).double()
    y = torch.cat([x[first] @ w[0].T, x[third] @ w[2].T, zeros])
    dx = torch.cat([dy[first] @ w[0], dy[third] @ w[2], zeros[:, :128]])
    dw = torch.stack([dy[first].T @ x[first], torch.zeros(256, 128), dy[third].T @ x[third]])
    for name, value, want in zip(("y", "dx", "dw"), got, (y, dx, dw), strict=True):
        assert torch.equal(value.cpu().double(), want), name


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_are_those_of_the_reference(impl):
    sizes = (33, 0, 31, 64)
    x, w, dy = torch.randn(130, 128), torch.randn(4, 256, 128), torch.randn(130, 256)
    granularity = 128 if impl == "coarse" else 32
    want = _run(
        mx_grouped_mm,
        x,
        w,
        dy,
        _offsets(sizes).cpu(),
        recipe=MXRecipe(granularity=granularity, impl="reference"),
    )
    recipe = MXRecipe(granularity=granularity, impl=impl)
    operands = [t.to(DEVICE) for t in (x, w, dy)]
    got = _run(mx_grouped_mm, *operands, _offsets(sizes), recipe=recipe)
    for name, value, expected in zip(("y", "dx", "dw"), got, want, strict=True):
        error = (value.cpu() - expected).norm() / expected.norm()
        # dw multiplies dy in bfloat16 on a GPU; the short sums of FP8 units are 2^-13 or so.
        assert error < (4e-3 if name == "dw" else 2e-3), name
    rows = [t[:33].to(DEVICE) for t in (x, dy)]
    alone = _run(mx_linear, rows[0], w[0].to(DEVICE), rows[1], recipe=recipe)
    for value, part in zip(alone, (got[0][:33], got[1][:33], got[2][0]), strict=True):
        torch.testing.assert_close(value, part, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_cache_gives_the_same_product_and_gradients(impl):
    """With "dequantise" it holds what is multiplied, so that no call dequantises the weights."""
    recipe = MXRecipe(granularity=128 if impl == "coarse" else 32, impl=impl)
    x, w, dy = (torch.randn(shape).to(DEVICE) for shape in ((9, 128), (256, 128), (9, 256)))
    w.requires_grad_()
    cache = WeightCache(w, recipe=recipe)
    held = isinstance(cache.forward_operand, torch.Tensor)
    assert held == isinstance(cache.input_grad_operand, torch.Tensor) == (impl == "dequantise")
    results = []
    for options in ({"cache": cache}, {}):
        leaf = x.detach().requires_grad_()
        y = mx_linear(leaf, w, recipe=recipe, **options)
        results.append([y.detach(), *torch.autograd.grad(y, (leaf, w), dy)])
    assert all(map(torch.equal, *results))
    with torch.no_grad():
        w += 1
    for read in (lambda: cache.forward_operand, lambda: cache.input_grad_operand):
        with pytest.raises(RuntimeError, match="is stale"):
            read()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("saved", "cached"), [("high", False), ("mxfp8", True)])
def test_experts_are_those_of_the_reference(impl, saved, cached):
    sizes, spare = (33, 0, 31), 6
    granularity = 128 if impl == "coarse" else 32
    x, up, down = torch.randn(70, 128), torch.randn(3, 256, 128), torch.randn(3, 128, 128)
    weights, dy = torch.rand(70), torch.randn(70, 128)
    x[64:], weights[64:], dy[64:] = torch.nan, torch.nan, torch.nan
    results = []
    for device, chosen in (("cpu", "reference"), (DEVICE, impl)):
        leaves = [t.to(device).requires_grad_() for t in (x, up / 16, down / 16, weights)]
        recipe = MXRecipe(granularity=granularity, saved=saved, impl=chosen)
        caches = None
        if cached:
            caches = tuple(WeightCache(w, recipe=recipe) for w in leaves[1:3])
        y = mx_swiglu_experts(
            *leaves[:3],
            _offsets(sizes).to(device),
            row_weights_R=leaves[3],
            recipe=recipe,
            caches=caches,
        )
        gradients = torch.autograd.grad(y, leaves, dy.to(device))
        results.append([t.detach().cpu() for t in (y, *gradients)])
    for name, want, got in zip(("y", "dx", "dw_up", "dw_down", "d_w"), *results, strict=True):
        # Sums in another order now and then round a hidden value to the next code.
        assert (got - want).norm() < 1e-2 * want.norm(), name
        if len(got) == 70:
            assert (got[70 - spare :] == 0).all(), name


def test_operators_keep_the_rules_of_torch():
    operators = torch.ops.olmo_mxfp8
    a, b = _quantised("coarse", torch.randn(9, 128), torch.randn(2, 128, 128))
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    x, w, offsets = dequantize(a, dtype), dequantize(b, dtype), _offsets((4, 5))
    torch.library.opcheck(operators.row_product.default, (x, w, offsets, torch.float32))
    torch.library.opcheck(operators.outer_product.default, (x, x, offsets, torch.float32))
    if HOPPER:
        codes = [(t.data.view(torch.uint8), t.scales, "e4m3") for t in (a, b)]
        arguments = (*codes[0], *codes[1], offsets, torch.float32, True)
        torch.library.opcheck(operators.scaled_row_product.default, arguments)


def test_what_cannot_run_says_why():
    a, b = _quantised("dequantise", torch.randn(8, 128), torch.randn(128, 128))
    with pytest.raises(ValueError, match="`impl='coarse'` cannot run: it needs rows with gran"):
        scaled_mm(a, b, impl="coarse")
    narrow = quantize(torch.randn(12, 128)).to(DEVICE)
    with pytest.raises(ValueError, match="output width must be a multiple of 8, got 12"):
        scaled_mm(a, narrow, impl="dequantise")
    if INTERPRETED or torch.cuda.get_device_capability()[0] not in (10, 12):
        with pytest.raises(ValueError, match="`impl='native'` cannot run: "):
            scaled_mm(a, b, impl="native")


@pytest.mark.skipif(not INTERPRETED, reason="the assertion ends a process's use of the device")
@pytest.mark.parametrize("ends", [(5, 3, 12), (-4, 3, 12), (3, 40, 50), (90, 2, 3)])
def test_bad_offsets_write_nothing_outside(ends):
    """The interpreter ignores assertions on the device, so what would be touched shows there."""
    from olmo_mxfp8._triton.outer_product import outer_product
    from olmo_mxfp8._triton.row_product import row_product

    guard, rows, width = 256, 12, 64
    whole = torch.full((guard + rows * width + guard,), 77.0)
    x, w = torch.randn(rows, 64), torch.randn(3, width, 64)

    class Inside(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.new_empty and args[1:] == (rows, width):
                return whole[guard : guard + rows * width].view(rows, width)
            return func(*args, **(kwargs or {}))

    offsets = torch.tensor(ends, dtype=torch.int32)
    with Inside():
        row_product(x, w, offsets, torch.float32)
    assert (whole[:guard] == 77).all()
    assert (whole[-guard:] == 77).all()
    assert outer_product(x, x, offsets, torch.float32).isfinite().all()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter is not for large tensors")
@pytest.mark.parametrize("impl", IMPLS)
def test_addresses_past_32_bits(impl):
    """Rows behind the first 2^32 values, and an expert behind them."""
    R, K = 2**20 + 64, 4096
    x = torch.zeros(R, K, device=DEVICE, dtype=torch.bfloat16)
    x[-64:] = torch.randint(-7, 8, (64, K), device=DEVICE)
    w = torch.zeros(2, K, K, device=DEVICE, dtype=torch.bfloat16)
    w[1] = torch.randint(-7, 8, (K, K), device=DEVICE)
    a = quantize(x, granularity=128 if impl == "coarse" else 32)
    b = quantize(w, granularity="128x128" if impl == "coarse" else 32)
    got = scaled_grouped_mm(a, b, _offsets((R - 64, 64)), impl=impl)
    assert torch.equal(got[-64:], (x[-64:].double() @ w[1].double().T).bfloat16())
    assert (got[-128:-64] == 0).all()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no device to wait for")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_waits_for_the_device(impl):
    x, w, dy = torch.randn(300, 256), torch.randn(3, 128, 256), torch.randn(300, 128)
    operands = [t.to(DEVICE).bfloat16() for t in (x, w, dy)]
    offsets = _offsets((100, 0, 180))
    recipes = [
        MXRecipe(granularity=128 if impl == "coarse" else 32, weight_grad=precision, impl=impl)
        for precision in ("high", "mxfp8")
    ]
    for recipe in recipes:
        _run(mx_grouped_mm, *operands, offsets, recipe=recipe)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for recipe in recipes:
            _run(mx_grouped_mm, *operands, offsets, recipe=recipe)
    finally:
        torch.cuda.set_sync_debug_mode("default")
