"""Laws of `quantize` as a whole."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_mxfp8 import (
    _quantize_impl,
    dequantize,
    quantize,
    quantize_both,
    quantize_with_transpose,
    swiglu_quantize,
    weighted_quantize,
)

ELEMENTS = ["e4m3", "e5m2"]
RULES = ["rceil", "floor"]
options = {"element": st.sampled_from(ELEMENTS), "scale_rule": st.sampled_from(RULES)}
few = settings(max_examples=20, deadline=None)


def codes(t):
    return t.data.view(torch.uint8)


def same(a, b):
    return torch.equal(codes(a), codes(b)) and torch.equal(a.scales, b.scales)


def spread(seed, rows=24, columns=96, binades=12.0):
    """Normal values whose magnitudes span many binades, between elements and between rows."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g)
    x *= torch.exp2(torch.randn(rows, columns, generator=g) * 3)
    return x * torch.exp2(torch.randn(rows, 1, generator=g) * binades)


@few
@given(seed=st.integers(0, 2**31), size=st.sampled_from([32, 128]), **options)
def test_codes_and_scales_are_those_of_the_oracle(oracle, seed, size, element, scale_rule):
    x = spread(seed, rows=8, columns=256)
    got = quantize(x, element=element, scale_rule=scale_rule, granularity=size)
    expected_codes, expected_scales = oracle.quantize(x, element, scale_rule, size)
    np.testing.assert_array_equal(codes(got).numpy(), expected_codes)
    np.testing.assert_array_equal(got.scales.numpy(), expected_scales)
    assert (got.dim, got.element, got.data.dtype) == (1, element, oracle.dtype[element])


@few
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32), **options)
def test_any_bit_patterns(oracle, bits, element, scale_rule):
    """Subnormals, huge values, infinities and NaN, mixed in one block."""
    x = torch.from_numpy(np.array([bits], dtype=np.uint32).view(np.float32))
    got = quantize(x, element=element, scale_rule=scale_rule)
    expected_codes, expected_scales = oracle.quantize(x, element, scale_rule)
    assert got.scales.tolist() == expected_scales.tolist()
    assert codes(got).tolist() == expected_codes.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_input_is_its_float32_value(dtype):
    every_value = torch.arange(2**16).to(torch.int16).view(dtype).view(-1, 32)
    assert same(quantize(every_value), quantize(every_value.float()))


@few
@given(seed=st.integers(0, 2**31), element=st.sampled_from(ELEMENTS))
def test_rceil_keeps_every_value_within_half_a_step(seed, element):
    x = spread(seed).double()
    t = quantize(x.float(), element=element)
    x = x.float().double()
    scale = torch.exp2(t.scales.double() - 127).repeat_interleave(32, 1)
    relative, absolute = {"e4m3": (2**-4, 2**-10), "e5m2": (2**-3, 2**-17)}[element]
    error = (dequantize(t, torch.float64) - x).abs()
    assert (error <= torch.maximum(relative * x.abs(), absolute * scale)).all()


@few
@given(seed=st.integers(0, 2**31), element=st.sampled_from(ELEMENTS))
def test_floor_has_the_same_bound_except_where_it_saturates(oracle, seed, element):
    x = spread(seed)
    t = quantize(x, element=element, scale_rule="floor")
    scale = torch.exp2(t.scales.double() - 127).repeat_interleave(32, 1)
    relative, absolute = {"e4m3": (2**-4, 2**-10), "e5m2": (2**-3, 2**-17)}[element]
    error = (dequantize(t, torch.float64) - x.double()).abs()
    bound = torch.maximum(relative * x.double().abs(), absolute * scale)
    saturated = t.data.float().abs() == oracle.max_value[element]
    assert ((error <= bound) | saturated).all()


@few
@given(seed=st.integers(0, 2**31), **options)
def test_a_second_round_trip_changes_no_value(seed, element, scale_rule):
    first = quantize(spread(seed), element=element, scale_rule=scale_rule)
    value = dequantize(first)
    second = quantize(value, element=element, scale_rule=scale_rule)
    assert torch.equal(dequantize(second), value)
    assert scale_rule == "rceil" or same(first, second)


def test_rceil_may_encode_the_same_values_one_scale_lower():
    x = torch.zeros(1, 32)
    x[0, 0] = 449.0  # does not fit below 448, so the scale is 2 and the element 224
    first = quantize(x)
    second = quantize(dequantize(first))
    assert (first.scales.item(), second.scales.item()) == (128, 127)
    assert torch.equal(dequantize(first), dequantize(second))


@few
@given(seed=st.integers(0, 2**31), power=st.integers(-30, 30), **options)
def test_a_power_of_two_moves_only_the_scales(seed, power, element, scale_rule):
    x = spread(seed, binades=3.0)
    t = quantize(x, element=element, scale_rule=scale_rule)
    moved = quantize(x * 2.0**power, element=element, scale_rule=scale_rule)
    assert torch.equal(codes(moved), codes(t))
    assert torch.equal(moved.scales.int(), t.scales.int() + power)


@few
@given(seed=st.integers(0, 2**31), dim=st.integers(-3, 2), size=st.sampled_from([32, 128]))
def test_a_dimension_is_quantised_as_if_it_were_the_last(seed, dim, size):
    shape = [3, 2, 5]
    shape[dim] = 2 * size
    x = spread(seed, rows=30, columns=2 * size)[:, : 2 * size].flatten()
    x = x[: int(np.prod(shape))].reshape(shape)
    t = quantize(x, dim=dim, granularity=size)
    last = quantize(x.movedim(dim, -1), granularity=size)
    assert t.dim == dim % 3
    assert t.data.is_contiguous()
    assert t.scales.is_contiguous()
    assert torch.equal(codes(t).movedim(dim, -1), codes(last))
    assert torch.equal(t.scales.movedim(dim, -1), last.scales)


def test_strided_input_is_read_by_value():
    x = spread(3, rows=64, columns=64)
    padded = torch.full((65, 200), torch.nan)
    padded[1:, 8:136:2] = x
    for view in (x.T.contiguous().T, padded[1:, 8:136:2], x.flip(0).flip(0)):
        t = quantize(view)
        assert same(t, quantize(x))
        assert t.data.is_contiguous()


def test_granularity_128_shares_the_largest_scale():
    x = spread(1, rows=6, columns=256)
    t = quantize(x, granularity=128)
    fine = quantize(x).scales.view(6, 2, 4)
    assert torch.equal(t.scales.view(6, 2, 4), fine.amax(-1, keepdim=True).expand(6, 2, 4))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_zeros_stay_zeros_with_their_sign(element, rule):
    x = torch.randn(3, 64)
    x[0, 32:] = 0.0  # a block
    x[1] = -0.0  # a row
    for tensor in (x, torch.zeros(2, 32)):
        t = quantize(tensor, element=element, scale_rule=rule)
        zero = tensor == 0
        assert torch.equal(codes(t)[zero], 128 * tensor[zero].signbit().to(torch.uint8))
        value = dequantize(t)
        assert torch.equal(value[zero], tensor[zero])
        assert torch.equal(value.signbit(), tensor.signbit())
        assert value.isfinite().all()
    assert t.scales.tolist() == [[0], [0]]


@pytest.mark.parametrize("element", ELEMENTS)
def test_tiny_blocks_have_scale_zero_and_are_rounded_not_halved(element, oracle):
    tiny = torch.tensor([1e-45, -1e-45, 1e-40, 1e-38, 2.0**-127, 2.0**-126, 1.2e-38])
    x = torch.zeros(len(tiny), 32)
    x[:, 5] = tiny
    t = quantize(x, element=element)
    assert (t.scales == 0).all()
    step = {"e4m3": 2.0**-136, "e5m2": 2.0**-143}[element]
    relative = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}[element]
    error = (dequantize(t, torch.float64)[:, 5] - tiny.double()).abs()
    assert (error <= torch.clamp_min(relative * tiny.double().abs(), step / 2)).all()
    assert codes(t)[:2, 5].tolist() == [0, 128]  # far below the smallest element


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 13, 31])
def test_nan_and_inf_stay_visible_and_local(element, rule, bad, place):
    x = torch.randn(4, 96)
    clean = quantize(x, element=element, scale_rule=rule)
    x[2, 32 + place] = bad
    t = quantize(x, element=element, scale_rule=rule)
    assert t.scales[2, 1] == 255
    assert (codes(t)[2, 32:64] == 0).all()
    assert dequantize(t)[2, 32:64].isnan().all()
    t.scales[2, 1] = clean.scales[2, 1]
    t.data[2, 32:64] = clean.data[2, 32:64]
    assert same(t, clean)


def test_the_largest_finite_values_stay_finite():
    x = torch.full((1, 32), torch.finfo(torch.float32).max)
    x[0, 1:] *= -1
    for t in (quantize(x, scale_rule="floor"), quantize(x, element="e5m2", scale_rule="floor")):
        assert t.scales.item() < 255
        assert dequantize(t).isfinite().all()
    assert dequantize(quantize(x), torch.float64).isfinite().all()


@pytest.mark.parametrize(("element", "factor"), [("e4m3", 1.9375), ("e5m2", 1.875)])
@pytest.mark.parametrize("granularity", [32, 128, "128x128"])
def test_only_the_largest_numbers_become_infinite_in_float32(element, factor, granularity):
    first = torch.tensor(factor * 2.0**127)
    largest = torch.tensor(torch.finfo(torch.float32).max)
    below = torch.nextafter(first, torch.tensor(0.0))
    x = torch.rand(128, 128) * largest
    x[0], x[1], x[2] = first, below, largest
    x[3] = torch.linspace(1, factor, 128) * 2.0**127
    options = {"element": element, "granularity": granularity}
    for signed in (x, -x, x.clamp_max(torch.finfo(torch.bfloat16).max).bfloat16()):
        t = quantize(signed, **options)
        wide = dequantize(t, torch.float64)
        assert wide.abs().max() == 2.0**128
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(dequantize(t, dtype).isinf(), signed.abs() >= first)
        assert dequantize(quantize(signed, scale_rule="floor", **options)).isfinite().all()


def _neg_views(*shape):
    """Tensors whose sign is a bit of theirs, which memory does not have."""
    x = torch.randn(*shape)
    z = torch.complex(x, torch.randn(*shape)).conj()
    return torch._neg_view(x), z.imag, z.imag.mT.contiguous().mT, torch._neg_view(x.half())


@pytest.mark.parametrize("granularity", [32, 128, "128x128"])
def test_a_lazy_sign_is_read(granularity):
    for x in _neg_views(128, 128):
        for dim in (-1,) if granularity == 128 else (0, 1):
            t = quantize(x, dim=dim, granularity=granularity)
            assert same(t, quantize(x.resolve_neg().clone(), dim=dim, granularity=granularity))
            assert (dequantize(t) - x.float()).abs().max() < 0.5
        rows = [
            quantize_both(x)[0],
            quantize_with_transpose(x)[0],
            weighted_quantize(x, torch.ones(128)),
        ]
        assert all(same(t, quantize(x.resolve_neg())) for t in rows)
        assert same(swiglu_quantize(x), swiglu_quantize(x.resolve_neg()))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 32, 2)])
def test_empty_tensors(shape):
    dim = 1
    t = quantize(torch.zeros(shape), dim=dim)
    assert t.shape == shape
    assert dequantize(t).shape == shape


def test_carries_no_gradient_and_leaves_its_input():
    x = torch.randn(2, 32, requires_grad=True)
    before = x.detach().clone()
    t = quantize(x)
    assert not dequantize(t).requires_grad
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": torch.zeros(2, 32).double()}, TypeError, r"`x` must .*float64.*`.float\(\)"),
        ({"x": torch.zeros(2, 32).int()}, TypeError, "`x` must be float32"),
        ({"x": torch.zeros(2, 44)}, ValueError, r"`x.shape\[1\]` must be.*44.*pad it to 64"),
        ({"x": torch.zeros(33, 32), "dim": 0}, ValueError, r"`x.shape\[0\]` .*pad it to 64"),
        ({"granularity": 128}, ValueError, r"multiple of 128 \(`granularity`\), got 32"),
        ({"granularity": 64}, ValueError, "`granularity` must be 32, 128 or '128x128', got 64"),
        ({"element": "e3m4"}, ValueError, "`element` must be 'e4m3' or 'e5m2', got 'e3m4'"),
        ({"scale_rule": "ceil"}, ValueError, "`scale_rule` must be 'rceil' or 'floor', got 'ceil'"),
        ({"dim": 2}, ValueError, r"`dim` must be in \[-2, 2\) for `x` of shape \(2, 32\), got 2"),
        ({"x": torch.tensor(1.0)}, ValueError, "`x` must have at least one dimension, got a scal"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        quantize(**{"x": torch.zeros(2, 32), **arguments})


def test_auto_takes_the_kernel_on_cuda_where_it_can(monkeypatch):
    """As it decides on CUDA, wherever this runs."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(_quantize_impl, "why_no_kernel", lambda device, index: None)
    assert _quantize_impl.pick("auto", device)
    assert not _quantize_impl.pick("auto", device, "it computes in float32")
    assert not _quantize_impl.pick("auto", torch.device("cpu"))
    assert not _quantize_impl.pick("reference", device)
    with pytest.raises(ValueError, match="`impl='triton'` cannot run: it computes in float32"):
        _quantize_impl.pick("triton", device, "it computes in float32")
    with pytest.raises(ValueError, match="`impl` must be one of"):
        _quantize_impl.pick("torch", device)
