"""Scale bytes and element codes against the oracle, exhaustively where that is cheap."""

import numpy as np
import pytest
import torch
from olmo_mxfp8 import quantize
from olmo_mxfp8._formats import FORMATS
from olmo_mxfp8.reference import encode, scale_bytes

ELEMENTS = ["e4m3", "e5m2"]
RULES = ["rceil", "floor"]


def bytes_of(amax, element, rule):
    bits = torch.as_tensor(amax, dtype=torch.float32).view(torch.int32)
    return scale_bytes(bits, FORMATS[element], rule)


@pytest.mark.parametrize("element", ELEMENTS)
def test_rceil_over_every_mantissa(element, oracle):
    """The scale steps up exactly above 1.75, where a float32 logarithm misses several values."""
    mantissa = torch.arange(2**23, dtype=torch.int32)
    got = scale_bytes(mantissa | 127 << 23, FORMATS[element], "rceil")
    base = oracle.byte(1.0, element, "rceil")
    assert torch.equal(got, base + (1 + mantissa.double() / 2**23 > 1.75))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_scale_around_the_boundary_in_every_binade(element, rule, oracle):
    """Around 1.75, around the power of two itself, and below the smallest normal number."""
    mantissas = [0, 1, 0x400000, 0x5FFFFE, 0x5FFFFF, 0x600000, 0x600001, 0x600002, 0x7FFFFF]
    bits = torch.tensor([e << 23 | m for e in range(255) for m in mantissas], dtype=torch.int32)
    amax = bits.view(torch.float32)
    got = bytes_of(amax, element, rule)
    assert got.tolist() == [oracle.byte(a, element, rule) for a in amax.tolist()]
    largest = {"e4m3": (247, 246), "e5m2": (240, 239)}[element][rule == "floor"]
    assert got.max() == largest  # 255 is left to NaN


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_every_normal_bfloat16_maximum(element, rule, oracle):
    """All 32512 of them, as bfloat16: a logarithm in that dtype gets a fifth of the bytes wrong."""
    amax = torch.arange(0x0080, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    assert amax.numel() == 32512
    x = torch.zeros(amax.numel(), 32, dtype=torch.bfloat16)
    x[:, 17] = -amax
    got = quantize(x, element=element, scale_rule=rule).scales[:, 0].tolist()
    assert got == [oracle.byte(a, element, rule) for a in amax.tolist()]


def test_known_scales():
    amax = [150.0, 300.0, 448.0, 449.0, 500.0, 600.0]
    assert bytes_of(amax, "e4m3", "rceil").tolist() == [126, 127, 127, 128, 128, 128]
    assert bytes_of(amax, "e4m3", "floor").tolist() == [126, 127, 127, 127, 127, 128]


@pytest.mark.parametrize("element", ELEMENTS)
def test_exactly_full_blocks_do_not_step_up_and_the_next_float_does(element, oracle):
    for n in range(-60, 61):
        full = torch.tensor([oracle.max_value[element] * 2.0**n])
        above = torch.nextafter(full, torch.tensor(torch.inf))
        assert bytes_of(full, element, "rceil").item() == 127 + n
        assert bytes_of(above, element, "rceil").item() == 128 + n


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_infinite_and_nan_maxima_have_scale_255(element, rule):
    assert bytes_of([torch.inf, torch.nan], element, rule).tolist() == [255, 255]


def interesting(element, oracle):
    """Every value of the format, every midpoint, their neighbours, and far too large ones."""
    values = [oracle.element(code, element) for code in range(128)]
    values = np.array([v for v in values if np.isfinite(v)])
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    near = [np.nextafter(points, np.float32(side)) for side in (-np.inf, np.inf)]
    large = oracle.max_value[element] * np.array([1.03, 1.0358, 1.1, 2, 1e20], dtype=np.float32)
    bf16 = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float().numpy()
    positive = np.concatenate([points, *near, large, bf16])
    return np.concatenate([positive, -positive])


@pytest.mark.parametrize("element", ELEMENTS)
def test_elements_round_to_nearest_even_and_saturate(element, oracle):
    x = interesting(element, oracle)
    got = encode(torch.from_numpy(x), FORMATS[element]).numpy()
    np.testing.assert_array_equal(got, oracle.encode(x.astype(np.float64), element))


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_finite_code_encodes_to_itself(element, oracle):
    codes = [c for c in range(256) if np.isfinite(oracle.element(c, element))]
    x = torch.tensor([oracle.element(c, element) for c in codes])
    assert encode(x, FORMATS[element]).tolist() == codes


@pytest.mark.parametrize("element", ELEMENTS)
def test_infinities_saturate(element):
    code = FORMATS[element].max_code
    got = encode(torch.tensor([torch.inf, -torch.inf]), FORMATS[element])
    assert got.tolist() == [code, code | 0x80]
