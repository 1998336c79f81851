"""`quantize_with_transpose`: a weight for its forward and for its input gradient."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_mxfp8 import dequantize, quantize, quantize_with_transpose

ELEMENTS = ["e4m3", "e5m2"]
RULES = ["rceil", "floor"]


def _codes(t):
    return t.data.view(torch.uint8)


def _weights(seed, *shape):
    """Magnitudes over many binades, along rows and along columns."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=g)
    w *= torch.exp2(torch.randn(*shape[:-1], 1, generator=g) * 8)
    return w * torch.exp2(torch.randn(*shape[:-2], 1, shape[-1], generator=g) * 8)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.sampled_from([(32, 96), (2, 64, 32)]),
    element=st.sampled_from(ELEMENTS),
    scale_rule=st.sampled_from(RULES),
)
def test_blocks_both_ways_are_those_of_the_oracle(oracle, seed, shape, element, scale_rule):
    w = _weights(seed, *shape)
    pair = quantize_with_transpose(w, element=element, scale_rule=scale_rule)
    for got, source in zip(pair, (w, w.mT), strict=True):
        codes, scales = oracle.quantize(source.contiguous(), element, scale_rule)
        np.testing.assert_array_equal(_codes(got).numpy(), codes)
        np.testing.assert_array_equal(got.scales.numpy(), scales)
        assert (got.dim, got.element, got.granularity) == (len(shape) - 1, element, 32)
        assert got.data.is_contiguous()
        assert got.scales.is_contiguous()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_tiles_both_ways_are_those_of_the_oracle(oracle, element, rule):
    w = _weights(0, 2, 128, 256)
    options = {"element": element, "scale_rule": rule, "granularity": "128x128"}
    straight, turned = quantize_with_transpose(w, **options)
    codes, bytes_ = oracle.quantize_tiles(w, element, rule)
    scales = bytes_.repeat(128, -2).repeat(4, -1)
    turned_scales = bytes_.swapaxes(-1, -2).repeat(128, -2).repeat(4, -1)
    np.testing.assert_array_equal(_codes(straight).numpy(), codes)
    np.testing.assert_array_equal(_codes(turned).numpy(), codes.swapaxes(-1, -2))
    np.testing.assert_array_equal(straight.scales.numpy(), scales)
    np.testing.assert_array_equal(turned.scales.numpy(), turned_scales)
    for t in (straight, turned):
        assert (t.dim, t.granularity) == (2, "128x128")
        assert t.data.is_contiguous()
        assert t.scales.is_contiguous()


def test_no_two_matrices_of_a_stack_share_a_block():
    w = torch.randn(3, 32, 64)
    want = [quantize_with_transpose(each) for each in w]
    w[1] = torch.nan
    for got, each in zip(quantize_with_transpose(w), zip(*want, strict=True), strict=True):
        assert dequantize(got)[1].isnan().all()
        for e in (0, 2):
            assert torch.equal(_codes(got)[e], _codes(each[e]))


def test_any_number_of_leading_dimensions_strides_and_nothing():
    w = torch.randn(2, 3, 32, 64)
    for source in (w, w.transpose(0, 1), w.mT, w[:, :, :, :32], w[:, :0]):
        for got, each in zip(quantize_with_transpose(source), (source, source.mT), strict=True):
            want = quantize(each)
            assert got.shape == each.shape
            assert torch.equal(_codes(got), _codes(want))
            assert torch.equal(got.scales, want.scales)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"w": torch.zeros(32)}, ValueError, r"`w` must be \(.., F, D\), got shape \(32,\)"),
        ({"w": torch.zeros(32, 44)}, ValueError, r"`w.shape\[1\]` must be a multiple of 32 .*44"),
        ({"w": torch.zeros(44, 32)}, ValueError, r"`w.shape\[0\]` must be a multiple of 32 .*44"),
        ({"granularity": "128x128"}, ValueError, r"`w.shape\[0\]` must be a multiple of 128"),
        ({"granularity": 128}, ValueError, "`granularity` must be 32 or '128x128', got 128"),
        ({"granularity": 32.0}, ValueError, "`granularity` must be 32 or '128x128', got 32.0"),
        ({"w": torch.zeros(32, 32).double()}, TypeError, "`w` must be float32, bfloat16"),
        ({"element": "e3m4"}, ValueError, "`element` must be 'e4m3' or 'e5m2'"),
        ({"scale_rule": "ceil"}, ValueError, "`scale_rule` must be 'rceil' or 'floor'"),
        ({"impl": "torch"}, ValueError, "`impl` must be one of"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        quantize_with_transpose(**{"w": torch.zeros(32, 128), **arguments})
