"""The kernels give the bits of the reference.

Run on a GPU; on a CPU `test_interpreter.py` runs this file once in Triton's interpreter, without
bfloat16, which the interpreter gets wrong.
"""

import math

import pytest
import torch
from mx_kernel_setting import DEVICE, INTERPRETED, KERNEL_MARKS
from olmo_mxfp8 import (
    MXTensor,
    dequantize,
    dequantize_rows,
    quantize,
    quantize_both,
    quantize_with_transpose,
    swiglu_quantize,
    weighted_quantize,
)
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]
CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
pytestmark = KERNEL_MARKS


def _hard(*shape, dtype, seed=0):
    """All magnitudes of float32, zeros of both signs, subnormal blocks, and what is not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    powers = torch.randint(-140, 120, (shape[0],), generator=generator).float()
    x *= torch.exp2(powers).view(-1, *[1] * (len(shape) - 1))
    flat = x.view(-1)
    flat[3], flat[5], flat[40], flat[200], flat[300] = 0, -0.0, math.nan, math.inf, -math.inf
    flat[64:96], flat[1000:1064] = 0, 1e-40
    return x.to(dtype)


def _bits(values):
    """The bits, with one NaN for all: which NaN a product makes is a device's own."""
    return torch.where(values.isnan(), math.nan, values).view(
        torch.int32 if values.dtype == torch.float32 else torch.int16
    )


def _assert_same(got, want):
    assert got.dim == want.dim
    assert torch.equal(got.data.view(torch.uint8).cpu(), want.data.view(torch.uint8))
    assert torch.equal(got.scales.cpu(), want.scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_quantize_gives_the_bits_of_the_reference(element, rule, dtype):
    options = {"element": element, "scale_rule": rule}
    for shape in [(64, 256), (128, 96), (2, 64, 33), (3, 32, 5, 128)]:
        x = _hard(*shape, dtype=dtype)
        for dim, size in enumerate(shape):
            for granularity in (32, 128):
                if size % granularity == 0:
                    case = {**options, "dim": dim, "granularity": granularity}
                    want = quantize(x, **case, impl="reference")
                    _assert_same(quantize(x.to(DEVICE), **case, impl="triton"), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("element", "rule"), [("e4m3", "rceil"), ("e5m2", "floor")])
def test_weighted_rows_give_the_bits_of_the_reference(element, rule, dtype):
    """Weights of any dtype and sign, 0 and not finite, and rows that no program divides."""
    for shape, granularity in (((40, 96), 32), ((33, 384), 128)):
        x = _hard(*shape, dtype=dtype)
        for weights_dtype in DTYPES:
            weights = torch.randn(shape[0], generator=torch.Generator().manual_seed(1))
            weights[5], weights[6], weights[7] = 0, -0.0, math.inf
            weights = weights.to(weights_dtype)
            case = {"element": element, "scale_rule": rule, "granularity": granularity}
            want = weighted_quantize(x, weights, **case, impl="reference")
            got = weighted_quantize(x.to(DEVICE), weights.to(DEVICE), **case, impl="triton")
            _assert_same(got, want)
            assert got.granularity == granularity


@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_tiles_give_the_bits_of_the_reference(element, rule):
    x = _hard(2, 256, 384, dtype=torch.float32)
    x[1, :128] = 0
    for dim in (1, 2):
        options = {"dim": dim, "element": element, "scale_rule": rule, "granularity": "128x128"}
        want = quantize(x, **options, impl="reference")
        _assert_same(quantize(x.to(DEVICE), **options, impl="triton"), want)


@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_both_orientations_are_those_of_two_calls(element, rule):
    options = {"element": element, "scale_rule": rule}
    for shape in [(32, 32), (64, 160), (96, 256)]:
        x = _hard(*shape, dtype=torch.float32)
        rows, columns = quantize_both(x.to(DEVICE), **options, impl="triton")
        _assert_same(rows, quantize(x, dim=1, **options, impl="reference"))
        _assert_same(columns, quantize(x, dim=0, **options, impl="reference"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_weights_and_their_transposes_are_those_of_two_calls(element, rule, dtype):
    """At sizes that no tile divides, with experts whose rows are not those of a program."""
    options = {"element": element, "scale_rule": rule}
    for shape, granularity in (
        ((2, 160, 96), 32),
        ((2, 2, 32, 32), 32),
        ((2, 128, 256), "128x128"),
    ):
        w = _hard(*shape, dtype=dtype)
        w.view(-1, *shape[-2:])[-1, :, -20:] *= 2.0**-20
        case = {**options, "granularity": granularity}
        got = quantize_with_transpose(w.to(DEVICE), **case, impl="triton")
        for t, source in zip(got, (w, w.mT), strict=True):
            _assert_same(t, quantize(source, **case, impl="reference"))
            assert t.granularity == granularity


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_every_code_under_every_scale_has_its_value(element):
    codes = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous()
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous()
    t = MXTensor(codes.view(CODES[element]), scales, 1, element)
    for dtype in DTYPES:
        want = dequantize(t, dtype, impl="reference")
        got = dequantize(t.to(DEVICE), dtype, impl="triton").cpu()
        assert torch.equal(_bits(got), _bits(want)), dtype


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_dequantize_reads_scales_along_any_dimension(dim):
    x = _hard(64, 32, 96, dtype=torch.float32)
    t = quantize(x, dim=dim, impl="reference")
    got = dequantize(t.to(DEVICE), impl="triton").cpu()
    assert torch.equal(_bits(got), _bits(dequantize(t, impl="reference")))


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_gathered_rows_have_the_bits_of_the_reference(element):
    for width in (32, 96, 4128):
        x = _hard(40, width, dtype=torch.float32)
        t = quantize(x, element=element, impl="reference")
        rows = torch.randint(-1, 40, (77,), generator=torch.Generator().manual_seed(1))
        for dtype in DTYPES:
            want = dequantize_rows(t, rows, dtype, impl="reference")
            got = dequantize_rows(t.to(DEVICE), rows.int().to(DEVICE), dtype, impl="triton")
            assert torch.equal(_bits(got.cpu()), _bits(want))
    none = dequantize_rows(t.to(DEVICE), rows[:0].to(DEVICE), impl="triton")
    assert none.shape == (0, 4128)


def test_layouts_and_empty_tensors():
    x = _hard(64, 64, dtype=torch.float32)
    views = [x.T, x[:, 32:], torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)]
    for view in views:
        want = quantize(view, impl="reference")
        _assert_same(quantize(view.to(DEVICE), impl="triton"), want)
    assert quantize(x[:0].to(DEVICE), impl="triton").scales.shape == (0, 2)
    turned = quantize_with_transpose(x[:0].to(DEVICE), impl="triton")[1]
    assert (turned.shape, turned.scales.shape) == ((64, 0), (64, 0))
    nothing = x[:0].to(DEVICE)
    assert weighted_quantize(nothing, nothing[:, 0], impl="triton").scales.shape == (0, 2)
    strided = torch.randn(64, 2)[:, 0]
    want = weighted_quantize(x.T, strided, impl="reference")
    _assert_same(weighted_quantize(x.T.to(DEVICE), strided.to(DEVICE), impl="triton"), want)
    assert dequantize(quantize(x[:0].to(DEVICE), impl="triton"), impl="triton").shape == (0, 64)


def test_operators_keep_the_rules_of_torch():
    x = _hard(64, 64, dtype=torch.float32).nan_to_num(0.0, 1.0, -1.0).to(DEVICE)
    operators = torch.ops.olmo_mxfp8
    torch.library.opcheck(operators.quantize.default, (x, 1, "e4m3", True, 32, False))
    torch.library.opcheck(operators.quantize_both.default, (x, "e5m2", False))
    torch.library.opcheck(operators.weighted_quantize.default, (x, x[:, 0], "e4m3", True, 32))
    stack = x.view(2, 32, 64)
    torch.library.opcheck(operators.quantize_with_transpose.default, (stack, "e4m3", True, False))
    codes, scales = operators.quantize(x, 0, "e4m3", True, 32, False)
    torch.library.opcheck(operators.dequantize.default, (codes, scales, 0, "e4m3", torch.float32))
    codes, scales = operators.quantize(x, 1, "e4m3", True, 32, False)
    rows = torch.tensor([3, -1, 60], device=DEVICE)
    arguments = (codes, scales, rows, "e4m3", torch.float32)
    torch.library.opcheck(operators.dequantize_rows.default, arguments)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter is not for large tensors")
def test_addresses_past_32_bits():
    x = torch.zeros(2**26 + 32, 32, device=DEVICE, dtype=torch.bfloat16)
    x[-32:] = torch.arange(32 * 32).view(32, 32)
    last = x[-32:].cpu()
    for dim in (1, 0):
        t = quantize(x, dim=dim, impl="triton")
        want = quantize(last, dim=dim, impl="reference")
        assert torch.equal(t.data[-32:].view(torch.uint8).cpu(), want.data.view(torch.uint8))
        assert torch.equal(t.scales[-want.scales.shape[0] :].cpu(), want.scales)
        values = dequantize(t, torch.bfloat16, impl="triton")[-32:].cpu()
        assert torch.equal(values, dequantize(want, torch.bfloat16, impl="reference"))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter is not for large tensors")
@pytest.mark.parametrize("granularity", [32, "128x128"])
def test_weights_past_32_bits(granularity):
    w = torch.zeros(2**19 + 128, 4096, device=DEVICE, dtype=torch.bfloat16)
    w[-128:] = torch.randn(128, 4096, device=DEVICE)
    straight, turned = quantize_with_transpose(w, granularity=granularity, impl="triton")
    last = w[-128:].cpu()
    want = quantize(last, granularity=granularity)
    assert torch.equal(straight.data[-128:].view(torch.uint8).cpu(), want.data.view(torch.uint8))
    assert torch.equal(straight.scales[-128:].cpu(), want.scales)
    want = quantize(last.mT, granularity=granularity)
    assert torch.equal(turned.data[:, -128:].view(torch.uint8).cpu(), want.data.view(torch.uint8))
    assert torch.equal(turned.scales[:, -4:].cpu(), want.scales)
    assert turned.data[:, :128].view(torch.uint8).count_nonzero() == 0


def test_a_lazy_sign_is_read():
    x = torch._neg_view(torch.randn(32, 64, device=DEVICE))
    clean = x.resolve_neg()
    for function in (
        quantize,
        quantize_both,
        quantize_with_transpose,
        swiglu_quantize,
        lambda x, impl: weighted_quantize(x, x[:, 0], impl=impl),
    ):
        got, want = function(x, impl="triton"), function(clean, impl="triton")
        for a, b in zip(*([t] if isinstance(t, MXTensor) else t for t in (got, want)), strict=True):
            assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))


class _Operators(TorchDispatchMode):
    """Collects the names of the operators of this package that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "olmo_mxfp8":
            self.names.append(func._schema.name.removeprefix("olmo_mxfp8::"))
        return func(*args, **(kwargs or {}))


def test_auto_takes_the_kernels_on_cuda_alone():
    x = torch.randn(64, 64, device=DEVICE)
    with _Operators() as ran:
        t = quantize(x)
        quantize_both(x)
        quantize_with_transpose(x)
        dequantize(t)
        dequantize(t, torch.float64)
        quantize(torch.zeros(128, 128, device=DEVICE), granularity="128x128")
        swiglu_quantize(x)
        weighted_quantize(x, x[:, 0])
        dequantize_rows(t, torch.zeros(3, device=DEVICE, dtype=torch.int32), torch.float32)
    # None in float64, which the kernels do not know.
    names = ["quantize", "quantize_both", "quantize_with_transpose", "dequantize"]
    names += ["quantize", "swiglu_quantize", "weighted_quantize", "dequantize_rows"]
    assert ran.names == ([] if INTERPRETED else names)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no device to wait for")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_nothing_waits_for_the_device():
    x = torch.randn(128, 256, device=DEVICE)
    dequantize(quantize(x, impl="triton"), impl="triton")
    quantize_both(x, impl="triton")
    quantize_with_transpose(x, impl="triton")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        dequantize(quantize(x, impl="triton"), impl="triton")
        quantize_both(x, impl="triton")
        quantize_with_transpose(x, impl="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
