"""Coarse scales: shared by four blocks or by a tile, and MXFP8 to whoever reads them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_mxfp8 import MXTensor, dequantize, quantize

ELEMENTS = ["e4m3", "e5m2"]
RULES = ["rceil", "floor"]
options = {"element": st.sampled_from(ELEMENTS), "scale_rule": st.sampled_from(RULES)}
few = settings(max_examples=15, deadline=None)


def codes(t):
    return t.data.view(torch.uint8)


def spread(seed, *shape):
    """Normal values whose magnitudes span many binades, between rows and between columns."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g)
    for dim in (-1, -2):
        size = [1] * len(shape)
        size[dim] = shape[dim]
        x *= torch.exp2(torch.randn(size, generator=g) * 3)
    return x


@few
@given(seed=st.integers(0, 2**31), **options)
def test_tiles_are_those_of_the_oracle(oracle, seed, element, scale_rule):
    x = spread(seed, 2, 256, 128)
    want_codes, want_scales = oracle.quantize_tiles(x, element, scale_rule)
    for dim in (-1, -2):
        t = quantize(x, dim=dim, element=element, scale_rule=scale_rule, granularity="128x128")
        np.testing.assert_array_equal(codes(t).numpy(), want_codes)
        times = (128, 4) if dim == -1 else (4, 128)
        repeated = want_scales.repeat(times[0], -2).repeat(times[1], -1)
        np.testing.assert_array_equal(t.scales.numpy(), repeated)
        assert (t.dim, t.granularity) == (dim % 3, "128x128")


@few
@given(seed=st.integers(0, 2**31), **options)
def test_a_reader_needs_not_know(seed, element, scale_rule):
    """As an ordinary `MXTensor`, codes and bytes mean the same."""
    x = spread(seed, 128, 256)
    for granularity in (128, "128x128"):
        t = quantize(x, element=element, scale_rule=scale_rule, granularity=granularity)
        plain = MXTensor(t.data, t.scales, t.dim, t.element)
        assert plain.granularity == 32
        assert torch.equal(dequantize(plain), dequantize(t))


@few
@given(seed=st.integers(0, 2**31), **options)
def test_coarse_is_fine_where_all_that_share_have_one_scale(seed, element, scale_rule):
    """Law: equal exponents of the largest values make coarse and fine the same bytes."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(128, 256, generator=g).clamp(-1, 1)
    x[:, ::32] = 1.25  # the largest of every block
    fine = quantize(x, element=element, scale_rule=scale_rule)
    for granularity in (128, "128x128"):
        t = quantize(x, element=element, scale_rule=scale_rule, granularity=granularity)
        assert torch.equal(codes(t), codes(fine))
        assert torch.equal(t.scales, fine.scales)
    x[5, 32] = 2.5  # one binade more in one block: no longer
    assert not torch.equal(
        quantize(x, element=element, granularity=128).scales,
        quantize(x, element=element).scales,
    )


@few
@given(seed=st.integers(0, 2**31), element=st.sampled_from(ELEMENTS))
def test_the_error_is_bounded_by_the_largest_that_shares_the_scale(seed, element):
    x = spread(seed, 128, 256)
    fours = x.abs().view(128, 2, 128).amax(-1).repeat_interleave(128, 1)
    tiles = x.abs().view(128, 2, 128).amax((0, 2)).repeat_interleave(128).expand(128, 256)
    relative, of_largest = {"e4m3": (2**-4, 2**-17), "e5m2": (2**-3, 2**-31)}[element]
    for granularity, largest in ((128, fours), ("128x128", tiles)):
        t = quantize(x, element=element, granularity=granularity)
        error = (dequantize(t, torch.float64) - x.double()).abs()
        bound = torch.maximum(relative * x.double().abs(), of_largest * largest.double())
        assert (error <= bound).all()


@few
@given(seed=st.integers(0, 2**31), **options)
def test_transposing_commutes_with_tiles(seed, element, scale_rule):
    """So one set of codes serves the forward and the input gradient."""
    w = spread(seed, 128, 256)
    case = {"element": element, "scale_rule": scale_rule, "granularity": "128x128"}
    t, transposed = quantize(w, **case), quantize(w.T, **case)
    assert torch.equal(codes(t).T, codes(transposed))
    assert torch.equal(t.scales[::128, ::4].T, transposed.scales[::128, ::4])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("granularity", [128, "128x128"])
def test_nan_and_inf_take_all_that_share_their_scale_and_nothing_else(granularity, rule, bad):
    x = torch.randn(256, 256)
    case = {"scale_rule": rule, "granularity": granularity}
    clean = quantize(x, **case)
    x[130, 70] = bad
    t = quantize(x, **case)
    rows = slice(128, 256) if granularity == "128x128" else slice(130, 131)
    lost = torch.zeros(256, 256, dtype=torch.bool)
    lost[rows, :128] = True
    assert torch.equal(dequantize(t).isnan(), lost)
    assert (codes(t)[lost] == 0).all()
    assert (t.scales[rows, :4] == 255).all()
    assert torch.equal(codes(t)[~lost], codes(clean)[~lost])


def test_coarse_costs_nothing_on_ordinary_data():
    x = torch.randn(512, 1024)
    error = {
        granularity: (
            (dequantize(quantize(x, granularity=granularity)) - x).norm() / x.norm()
        ).item()
        for granularity in (32, 128, "128x128")
    }
    assert error[128] < 1.005 * error[32]
    assert error["128x128"] < 1.005 * error[32]


@pytest.mark.parametrize(
    ("shape", "dim", "message"),
    [
        ((128, 96), 1, r"`x.shape\[1\]` must be a multiple of 128 .* got 96"),
        ((96, 128), 1, r"`x.shape\[0\]` must be a multiple of 128 .* got 96"),
        ((128, 128, 128), 0, "`dim` must be one of those, got 0"),
        ((128,), 0, "the last two dimensions, so `dim` must be one of those"),
    ],
)
def test_tensors_without_whole_tiles_are_refused(shape, dim, message):
    with pytest.raises(ValueError, match=message):
        quantize(torch.zeros(shape), dim=dim, granularity="128x128")


def test_a_tensor_that_cannot_have_the_granularity_it_claims_is_refused():
    t = quantize(torch.zeros(4, 96))
    with pytest.raises(ValueError, match=r"`data.shape\[1\]` must be a multiple of 128"):
        MXTensor(t.data, t.scales, 1, "e4m3", 128)
    assert quantize(torch.zeros(4, 128), granularity=128).to("cpu").granularity == 128
