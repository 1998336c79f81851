"""`quantize` beside torchao's reference: the same bits, and where not, what each gives.

torchao is another implementation of the format by other people. Where the two differ the oracle,
which shares no code with either, says which is right.
"""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_mxfp8 import MXTensor, dequantize, quantize

ELEMENTS = ["e4m3", "e5m2"]
RULES = ["rceil", "floor"]
DTYPES = [torch.float32, torch.bfloat16]
LARGEST_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}


@pytest.fixture(scope="module")
def torchao():
    """Return what torchao's `to_mx` makes of a matrix, as an `MXTensor`."""
    with warnings.catch_warnings():
        # Of torchao's own source, whenever Python compiles it: an escape in a docstring.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", SyntaxWarning)
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    modes = {"rceil": ScaleCalculationMode.RCEIL, "floor": ScaleCalculationMode.FLOOR}

    def quantized(x, element, rule):
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[element]
        scales, data = to_mx(x, dtype, 32, modes[rule])
        return MXTensor(data, scales.view(torch.uint8), 1, element)

    return quantized


def codes(t):
    return t.data.view(torch.uint8)


def same_blocks(a, b):
    """Whether bytes and codes are equal, `(rows, blocks)`."""
    equal = (codes(a) == codes(b)).unflatten(1, (-1, 32)).all(-1)
    return equal & (a.scales == b.scales)


def just_above_a_largest(x):
    """Blocks whose largest value is up to 64 steps of float32 above 1.75 times a power of two."""
    bits = x.float().abs().unflatten(1, (-1, 32)).amax(-1).view(torch.int32)
    above = (bits & 0x7FFFFF) - 0x600000
    return (above > 0) & (above <= 64)


def assert_ours_is_that_of_the_oracle(t, x, element, rule, oracle):
    want_codes, want_scales = oracle.quantize(x, element, rule)
    np.testing.assert_array_equal(codes(t).numpy(), want_codes)
    np.testing.assert_array_equal(t.scales.numpy(), want_scales)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    element=st.sampled_from(ELEMENTS),
    rule=st.sampled_from(RULES),
    dtype=st.sampled_from(DTYPES),
)
def test_values_of_many_binades_have_the_same_bits(torchao, seed, element, rule, dtype):
    """With zeros of both signs among them, and blocks of nothing else."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 128, generator=g) * torch.exp2(torch.randn(64, 128, generator=g) * 3)
    x *= torch.exp2(torch.randint(-60, 61, (64, 4), generator=g)).repeat_interleave(32, 1)
    zero = torch.rand(64, 128, generator=g) < 0.1
    zero[::7, :32] = True
    x = torch.where(zero, torch.copysign(torch.zeros(()), x), x).to(dtype)
    ours, theirs = quantize(x, element=element, scale_rule=rule), torchao(x, element, rule)
    same = same_blocks(ours, theirs)
    assert (same | (just_above_a_largest(x) & (rule == "rceil"))).all()
    assert same.sum() >= 250


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_every_bfloat16_as_the_largest_of_its_block(torchao, element, rule):
    """The same bits from the first block on whose scale byte is not 0."""
    largest = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)
    x = largest[largest.isfinite()][:, None] * torch.linspace(-1, 1, 32)
    x = x.bfloat16()
    ours, theirs = quantize(x, element=element, scale_rule=rule), torchao(x, element, rule)
    lost = (ours.scales == 0) & (x != 0).any(1, keepdim=True)
    assert torch.equal(ours.scales, theirs.scales)
    assert (same_blocks(ours, theirs) | lost).all()
    assert lost.sum() < 0.1 * len(x)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_a_block_of_tiny_values_is_lost_or_halved_by_torchao(torchao, oracle, element, rule):
    """Scale byte 0 is 2^-127. torchao takes it for 1 with `rceil`, for 2^-126 with `floor`."""
    x = torch.zeros(3, 32)
    x[:, :4] = torch.tensor([1.0, -1.25, 0.5, -0.0])
    x *= torch.tensor([[2.0**-119], [2.0**-124], [2.0**-127]])
    ours, theirs = quantize(x, element=element, scale_rule=rule), torchao(x, element, rule)
    assert_ours_is_that_of_the_oracle(ours, x, element, rule, oracle)
    assert torch.equal(dequantize(ours), x)
    assert (ours.scales == 0).all()
    assert (theirs.scales == 0).all()
    if rule == "rceil":
        assert (dequantize(theirs) == 0).all()
    else:
        assert torch.equal(dequantize(theirs), x / 2)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinity_becomes_a_number_of_torchaos(torchao, oracle, element, rule, sign):
    """Its byte is below 255 and its code the largest number: of what diverged nothing shows."""
    x = torch.randn(2, 64)
    x[1, 40] = sign * torch.inf
    ours, theirs = quantize(x, element=element, scale_rule=rule), torchao(x, element, rule)
    assert_ours_is_that_of_the_oracle(ours, x, element, rule, oracle)
    assert same_blocks(ours, theirs).tolist() == [[True, True], [True, False]]
    assert ours.scales[1, 1] == 255
    assert (codes(ours)[1, 32:] == 0).all()
    floor = {"e4m3": 247, "e5m2": 240}[element]
    assert theirs.scales[1, 1] == (254 if rule == "rceil" else floor)
    assert codes(theirs)[1, 40] == LARGEST_CODE[element] + 128 * (sign < 0)
    assert dequantize(ours)[1, 32:].isnan().all()
    assert dequantize(theirs, torch.float64)[1, 32:].isfinite().all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_a_nan_is_nan_to_both_under_other_codes(torchao, oracle, element, rule):
    """Byte 255 makes the block NaN whatever its codes, which torchao leaves and we clear."""
    x = torch.randn(2, 64)
    x[1, 40] = torch.nan
    ours, theirs = quantize(x, element=element, scale_rule=rule), torchao(x, element, rule)
    assert_ours_is_that_of_the_oracle(ours, x, element, rule, oracle)
    assert same_blocks(ours, theirs).tolist() == [[True, True], [True, False]]
    assert torch.equal(ours.scales, theirs.scales)
    assert ours.scales[1, 1] == 255
    assert (codes(ours)[1, 32:] == 0).all()
    # With `rceil` every code of the block is NaN, with `floor` that of the NaN.
    is_nan = theirs.data[1, 32:].float().isnan()
    assert is_nan.nonzero().flatten().tolist() == (list(range(32)) if rule == "rceil" else [8])
    assert torch.equal(dequantize(ours).isnan(), dequantize(theirs).isnan())


@pytest.mark.parametrize("element", ELEMENTS)
def test_a_largest_value_just_above_a_largest_element_saturates_in_torchao(
    torchao, oracle, element
):
    """`rceil` takes the smallest scale under which no value saturates.

    torchao rounds up a logarithm in float32, which is a whole number up to some steps too far.
    """
    x = torch.zeros(5, 32)
    x[:, 0] = torch.exp2(torch.tensor([-60.0, -9.0, 20.0, 60.0, 100.0])) * 1.75
    at = quantize(x, element=element), torchao(x, element, "rceil")
    assert same_blocks(*at).all()
    x[:, 0] = torch.nextafter(x[:, 0], torch.tensor(torch.inf))
    ours, theirs = quantize(x, element=element), torchao(x, element, "rceil")
    assert_ours_is_that_of_the_oracle(ours, x, element, "rceil", oracle)
    assert torch.equal(ours.scales, at[0].scales + 1)
    assert torch.equal(theirs.scales, at[1].scales)
    assert (codes(theirs)[:, 0] == LARGEST_CODE[element]).all()
    far = x.clone()
    far[:, 0] *= 1 + 2.0**-17
    assert same_blocks(quantize(far, element=element), torchao(far, element, "rceil")).all()
