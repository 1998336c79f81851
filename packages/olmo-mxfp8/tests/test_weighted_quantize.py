"""`weighted_quantize`: rows times the weights of their routes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_mxfp8 import dequantize, quantize, weighted_quantize

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    granularity=st.sampled_from([32, 128]),
    element=st.sampled_from(["e4m3", "e5m2"]),
)
def test_it_is_the_float32_product_quantised(oracle, seed, dtypes, granularity, element):
    """The oracle rounds the exact product to float32 once."""
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(5, 128, generator=g) * 100).to(dtypes[0])
    weights = torch.randn(5, generator=g).to(dtypes[1])
    product = (x.double() * weights.double()[:, None]).float()
    options = {"element": element, "scale_rule": "floor", "granularity": granularity}
    got = weighted_quantize(x, weights, **options)
    codes, scales = oracle.quantize(product, element, "floor", granularity)
    np.testing.assert_array_equal(got.data.view(torch.uint8).numpy(), codes)
    np.testing.assert_array_equal(got.scales.numpy(), scales)
    assert (got.dim, got.element, got.granularity) == (1, element, granularity)


def test_weights_that_are_not_finite_stay_visible_and_local():
    x = torch.ones(4, 64)
    x[3, 40] = torch.inf
    weights = torch.tensor([2.0, torch.nan, torch.inf, 0.0])
    back = dequantize(weighted_quantize(x, weights))
    assert torch.equal(back[0], torch.full((64,), 2.0))
    assert back[1:3].isnan().all()
    assert (back[3, :32] == 0).all()
    assert back[3, 32:].isnan().all()


def test_weights_of_one_change_nothing_and_no_gradient_comes_of_it():
    x = torch.randn(6, 64, requires_grad=True)
    got = weighted_quantize(x, torch.ones(6, requires_grad=True))
    want = quantize(x)
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
    assert torch.equal(got.scales, want.scales)
    assert not dequantize(got).requires_grad


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x_RD": torch.zeros(32)}, ValueError, r"`x_RD` must have two dimensions, got shape"),
        ({"x_RD": torch.zeros(2, 44)}, ValueError, r"`x_RD.shape\[1\]` must be .* 32 .* got 44"),
        ({"granularity": 128}, ValueError, r"`x_RD.shape\[1\]` must be .* 128 .* got 32"),
        ({"granularity": "128x128"}, ValueError, "`granularity` must be 32 or 128, got '128x128'"),
        ({"row_weights_R": torch.zeros(3)}, ValueError, r"must be \(2,\) on cpu, as `x_RD`, got"),
        ({"row_weights_R": torch.zeros(2, 1)}, ValueError, r"must be \(2,\) .* got \(2, 1\)"),
        ({"row_weights_R": torch.zeros(2, device="meta")}, ValueError, r"got \(2,\) on meta"),
        ({"row_weights_R": torch.zeros(2).int()}, TypeError, "`row_weights_R` must be float32"),
        ({"x_RD": torch.zeros(2, 32).double()}, TypeError, "`x_RD` must be float32"),
        ({"element": "e3m4"}, ValueError, "`element` must be"),
        ({"scale_rule": "ceil"}, ValueError, "`scale_rule` must be"),
        ({"impl": "torch"}, ValueError, "`impl` must be one of"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        weighted_quantize(
            **{"x_RD": torch.zeros(2, 32), "row_weights_R": torch.zeros(2)} | arguments
        )
