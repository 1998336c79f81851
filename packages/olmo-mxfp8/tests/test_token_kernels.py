"""The weight gradient on FP8 units: operands quantised along tokens, and their product.

Run on a GPU; on a CPU `test_token_interpreter.py` runs this file in Triton's interpreter.
"""

import pytest
import torch
from mx_kernel_setting import DEVICE, INTERPRETED, KERNEL_MARKS
from olmo_mxfp8 import (
    MXRecipe,
    MXTensor,
    _functional,
    dequantize,
    mx_grouped_mm,
    mx_linear,
    mx_swiglu_experts,
    quantize,
)
from olmo_mxfp8._functional import weight_gradient
from olmo_mxfp8._groups import Groups
from olmo_mxfp8._token_kernels import quantize_tokens, token_product

pytestmark = KERNEL_MARKS
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.x")
needs_fp8 = pytest.mark.skipif(
    not (HOPPER or INTERPRETED), reason="needs compute capability 9.x or the interpreter"
)
SIZES = [(129, 0, 1, 127), (0, 0), (128, 256), (3,), (127, 1, 0, 255, 1, 2)]
SPARE = 5  # rows that are nobody's


def _offsets(sizes):
    return torch.tensor(sizes).cumsum(0).int().to(DEVICE)


def _blocks(sizes):
    """Yield each block's expert, place and rows."""
    start = 0
    for e, size in enumerate(sizes):
        for j in range(-(-size // 128)):
            rows = slice(start + 128 * j, start + min(size, 128 * j + 128))
            yield e, start // 128 + e + j, rows
        start += size


def _values(*shape):
    """Normal values whose magnitude differs along every dimension."""
    x = torch.randn(*shape)
    for dim in range(len(shape)):
        size = [1] * len(shape)
        size[dim] = shape[dim]
        x *= torch.exp2(torch.randint(-9, 9, size).float())
    return x


def _quantised(x, sizes, element="e4m3", rule="rceil"):
    x = x.to(DEVICE)
    return quantize_tokens(x, None, None, _offsets(sizes), element, rule == "rceil")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("source", "element", "rule", "D"),
    [
        ("values", "e4m3", "rceil", 96),
        ("values", "e5m2", "floor", 128),
        ("e4m3", "e4m3", "rceil", 128),
        ("e5m2", "e4m3", "floor", 96),
    ],
)
def test_blocks_hold_the_bits_of_the_reference(sizes, source, element, rule, D):
    total = sum(sizes)
    x = _values(total + SPARE, D)
    if total:
        x[total // 2, 7] = torch.nan
    given = x.to(DEVICE), None, None
    if source != "values":
        t = quantize(x, element=source, impl="reference")
        x = dequantize(t)
        given = t.data.view(torch.uint8).to(DEVICE), t.scales.to(DEVICE), source
    x[total:] = torch.nan
    codes, scales = quantize_tokens(*given, _offsets(sizes), element, rule == "rceil")
    assert codes.shape == (D, 128 * ((total + SPARE) // 128 + len(sizes)))
    seen = set()
    for _, place, rows in _blocks(sizes):
        seen.add(place)
        block = torch.zeros(128, D)
        block[: rows.stop - rows.start] = x[rows]
        want = quantize(
            block, dim=0, element=element, scale_rule=rule, granularity=128, impl="reference"
        )
        got = codes[:, 128 * place : 128 * place + 128].cpu()
        assert torch.equal(got, want.data.view(torch.uint8).T)
        powers = torch.exp2(want.scales[0].double() - 127).float()
        powers[want.scales[0] == 255] = torch.nan
        torch.testing.assert_close(scales[place].cpu(), powers, rtol=0, atol=0, equal_nan=True)
    assert len(seen) == sum(-(-size // 128) for size in sizes)


def _exact(a, b, sizes, elements):
    """The product of what both operands hold, and a bound of its error, in float64.

    In a sum of 128 products, added 32 at a time, Hopper's units keep 13 bits behind the largest.
    """
    found = []
    for operand, element in zip((a, b), elements, strict=True):
        codes, scales = (each.cpu() for each in operand)
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[element]
        ones = torch.full((codes.shape[0], codes.shape[1] // 32), 127, dtype=torch.uint8)
        values = dequantize(MXTensor(codes.view(dtype), ones, 1, element), torch.float64)
        found.append(values * scales.T.repeat_interleave(128, 1).double())
    exact = torch.zeros(len(sizes), found[0].shape[0], found[1].shape[0], dtype=torch.float64)
    bound = exact.clone()
    for e, place, _ in _blocks(sizes):
        left, right = (each[:, 128 * place : 128 * place + 128] for each in found)
        exact[e] += left @ right.T
        largest = (left.abs()[:, None] * right.abs()).amax(-1)
        bound[e] += (128 + 4) * 2.0**-13 * largest + 2.0**-22 * (left.abs() @ right.abs().T)
    return exact, bound


def _multiply(a, b, elements, sizes, num_rows, dtype=torch.float32):
    return token_product(*a, *b, *elements, _offsets(sizes), num_rows, dtype)


@needs_fp8
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("elements", [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_the_product_is_that_of_the_operands(sizes, elements):
    total = sum(sizes)
    dy, x = _values(total + SPARE, 128), _values(total + SPARE, 256)
    dy[total:], x[total:] = torch.nan, torch.inf
    a, b = _quantised(dy, sizes, elements[0]), _quantised(x, sizes, elements[1])
    arguments = (a, b, elements, sizes, total + SPARE)
    got = _multiply(*arguments).cpu().double()
    exact, bound = _exact(a, b, sizes, elements)
    assert ((got - exact).abs() <= bound).all()
    assert all((got[e] == 0).all() for e, size in enumerate(sizes) if size == 0)
    if not INTERPRETED:
        rounded = _multiply(*arguments, torch.bfloat16).cpu().double()
        assert torch.equal(rounded, got.bfloat16().double())


@needs_fp8
def test_the_ends_of_the_scales():
    """NaN stays in its column and expert; a sum of 0 is 0 under any scales; tiny is not lost."""
    dy, x = torch.zeros(6, 128), torch.zeros(6, 128)
    dy[0, 0], x[0, 0] = 2.0**-127, 2.0**120
    dy[0, 1], x[0, 1] = 2.0**120, 0
    dy[1, 2], x[0, 2] = 2.0**127, 2.0**127  # never in one token: 0, though both scales are huge
    dy[4, 3] = torch.nan
    x[5, 4] = torch.inf
    sizes = (3, 3)
    a, b = _quantised(dy, sizes), _quantised(x, sizes)
    got = _multiply(a, b, ("e4m3", "e4m3"), sizes, 6).cpu()
    assert got[0, 0, 0] == 2.0**-7
    assert got[0, 1, 0] == torch.inf
    assert got[0, 2, 2] == 0
    lost = torch.zeros(128, 128, dtype=torch.bool)
    lost[3], lost[:, 4] = True, True
    assert torch.equal(got[1].isnan(), lost)
    assert not got[0].isnan().any()
    assert (got[1][~lost] == 0).all()


def _both(dy, rows, sizes, recipe, dtype=torch.float32):
    """The weight gradient by the reference on the CPU, and on FP8 units."""
    offsets = _offsets(sizes)
    groups = Groups(offsets.tolist(), offsets.cpu())
    want = weight_gradient(dy, rows, groups, recipe, "reference", dtype)
    on_device = Groups(None, offsets), recipe, "coarse", dtype
    return want, weight_gradient(dy.to(DEVICE), rows.to(DEVICE), *on_device).cpu()


@needs_fp8
@pytest.mark.parametrize(("rule", "grad_element"), [("rceil", "e4m3"), ("floor", "e5m2")])
@pytest.mark.parametrize("quantised", [False, True])
def test_the_weight_gradient_is_that_of_the_reference(rule, grad_element, quantised):
    """From `dy` as it is, or as experts have that of their hidden layer, in MXFP8 alone."""
    sizes = (129, 0, 3)
    x, dy = torch.randn(137, 128), torch.randn(137, 256)
    x[132:], dy[132:] = torch.nan, torch.nan
    recipe = MXRecipe(
        granularity=128, weight_grad="mxfp8", grad_element=grad_element, scale_rule=rule
    )
    if quantised:
        dy = quantize(dy, element=grad_element, granularity=128, impl="reference")
    want, got = _both(dy, quantize(x, granularity=128, impl="reference"), sizes, recipe)
    assert (got - want).norm() < 1e-3 * want.norm()
    assert (got[1] == 0).all()


@needs_fp8
def test_nothing_to_multiply():
    rows = quantize(torch.zeros(0, 128), granularity=128, impl="reference")
    recipe = MXRecipe(granularity=128, weight_grad="mxfp8")
    for dw in _both(torch.zeros(0, 128), rows, (0, 0), recipe):
        assert dw.shape == (2, 128, 128)
        assert (dw == 0).all()


@needs_fp8
@pytest.mark.parametrize(
    ("granularity", "impl", "precision", "asked"),
    [
        (128, "coarse", "high", False),
        (128, "dequantise", "mxfp8", False),
        (32, "dequantise", "mxfp8", False),
        (128, "coarse", "mxfp8", True),
    ],
)
def test_only_a_recipe_that_asks_gets_it(monkeypatch, granularity, impl, precision, asked):
    calls = []
    multiply = _functional.multiply_across_tokens
    monkeypatch.setattr(
        _functional, "multiply_across_tokens", lambda *rest: calls.append(1) or multiply(*rest)
    )
    rows = quantize(torch.randn(9, 128), granularity=granularity).to(DEVICE)
    recipe = MXRecipe(granularity=granularity, weight_grad=precision)
    groups = Groups([4, 9], _offsets((4, 5)))
    weight_gradient(torch.randn(9, 128).to(DEVICE), rows, groups, recipe, impl, torch.float32)
    assert bool(calls) == asked


def _gradients(function, leaves, dy, *arguments, **options):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    y = function(*leaves, *arguments, **options)
    return [each.cpu() for each in torch.autograd.grad(y, leaves, dy)]


@needs_hopper
def test_layers_train_with_it():
    sizes = (129, 0, 3)
    x, w, dy = torch.randn(137, 128), torch.randn(3, 256, 128), torch.randn(137, 256)
    results = []
    for device, impl in (("cpu", "reference"), (DEVICE, "auto")):
        recipe = MXRecipe(granularity=128, weight_grad="mxfp8", impl=impl)
        leaves = [each.to(device) for each in (x, w)]
        offsets = _offsets(sizes).to(device)
        results.append(_gradients(mx_grouped_mm, leaves, dy.to(device), offsets, recipe=recipe)[1])
    want, got = results
    assert (got - want).norm() < 1e-3 * want.norm()
    alone = [each[:129].to(DEVICE) for each in (x, dy)]
    linear = _gradients(mx_linear, [alone[0], w[0].to(DEVICE)], alone[1], recipe=recipe)[1]
    torch.testing.assert_close(linear, got[0], rtol=1e-5, atol=1e-4)


@needs_hopper
def test_experts_train_with_it():
    sizes = (33, 0, 31)
    x, dy, weights = torch.randn(64, 128), torch.randn(64, 128), torch.rand(64)
    up, down = torch.randn(3, 256, 128) / 16, torch.randn(3, 128, 128) / 16
    results = []
    for device, impl in (("cpu", "reference"), (DEVICE, "coarse")):
        recipe = MXRecipe(granularity=128, weight_grad="mxfp8", grad_element="e5m2", impl=impl)
        results.append(
            _gradients(
                mx_swiglu_experts,
                [each.to(device) for each in (x, up, down)],
                dy.to(device),
                _offsets(sizes).to(device),
                row_weights_R=weights.to(device),
                recipe=recipe,
            )
        )
    for name, want, got in zip(("dx", "dw_up", "dw_down"), *results, strict=True):
        # Sums in another order now and then round a hidden value to the next code.
        assert (got - want).norm() < 1e-2 * want.norm(), name


def test_operators_keep_the_rules_of_torch():
    operators = torch.ops.olmo_mxfp8
    x, offsets = torch.randn(9, 128).to(DEVICE), _offsets((4, 5))
    # What lies at places that no block has is never written: a product reads none of it.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for source in ((x, None, None), (*_codes(x), "e4m3")):
        arguments = (*source, offsets, "e4m3", True)
        torch.library.opcheck(operators.quantize_tokens.default, arguments, test_utils=checks[1:])
    if HOPPER or INTERPRETED:
        operand = quantize_tokens(x, None, None, offsets, "e4m3", True)
        arguments = (*operand, *operand, "e4m3", "e4m3", offsets, 9, torch.float32)
        torch.library.opcheck(operators.token_product.default, arguments, test_utils=checks)


def _codes(x):
    t = quantize(x)
    return t.data.view(torch.uint8), t.scales


@pytest.mark.skipif(not INTERPRETED, reason="the assertion ends a process's use of the device")
@pytest.mark.parametrize("ends", [(5, 3, 12), (-4, 3, 12), (3, 40, 50), (90, 2, 3)])
def test_bad_offsets_write_nothing_outside(ends):
    """The interpreter ignores assertions on the device, so what would be touched shows there."""
    guard, sizes = 256, {}

    class Inside(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if func is torch.Tensor.new_empty and "dtype" in kwargs:
                numel = torch.Size(args[1:]).numel()
                whole = torch.full((guard + numel + guard,), 77, dtype=kwargs["dtype"])
                sizes[numel] = whole
                return whole[guard : guard + numel].view(args[1:])
            return func(*args, **kwargs)

    offsets = torch.tensor(ends, dtype=torch.int32)
    from olmo_mxfp8._formats import FORMATS
    from olmo_mxfp8._triton.quantize_tokens import quantize_tokens as kernel
    from olmo_mxfp8._triton.token_product import token_product as product

    with Inside():
        codes, scales = kernel(
            torch.randn(12, 64), None, None, offsets, FORMATS["e4m3"], rceil=True
        )
    assert len(sizes) == 2
    for whole in sizes.values():
        assert (whole[:guard] == 77).all()
        assert (whole[-guard:] == 77).all()
    codes = codes.fill_(0).view(torch.float8_e4m3fn)
    dw = product(codes, scales.fill_(1), codes, scales, offsets, 12, torch.float32)
    assert (dw == 0).all()


@needs_hopper
def test_addresses_past_32_bits():
    """Codes of the last columns, and an expert behind the first 2^32 values."""
    R, D = 2**20 + 64, 4224
    x = torch.zeros(R, D, device=DEVICE, dtype=torch.bfloat16)
    dy = torch.zeros(R, 128, device=DEVICE, dtype=torch.bfloat16)
    x[-64:], dy[-64:] = (torch.randint(-7, 8, t[-64:].shape, device=DEVICE) for t in (x, dy))
    sizes = (R - 64, 64)
    a, b = _quantised(dy, sizes), _quantised(x, sizes)
    got = _multiply(a, b, ("e4m3", "e4m3"), sizes, R)
    assert torch.equal(got[1].double(), dy[-64:].double().T @ x[-64:].double())
    assert (got[0] == 0).all()


@needs_hopper
def test_many_tiles_of_many_experts():
    """More tiles than programs and more steps than buffers, in turns of every length."""
    sizes = (*torch.randint(0, 900, (17,)).tolist(), 0)
    total = sum(sizes)
    x, dy = (torch.randint(-7, 8, (total, width), device=DEVICE) for width in (1024, 1280))
    operands = [_quantised(t.bfloat16(), sizes) for t in (dy, x)]
    got = _multiply(*operands, ("e4m3", "e4m3"), sizes, total)
    start = 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        # Sums of a block are exact in 13 bits, and those of blocks in float32.
        assert torch.equal(got[e].double(), dy[rows].double().T @ x[rows].double()), e
        start += size
