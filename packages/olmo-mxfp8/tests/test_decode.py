"""What codes and scale bytes mean: all 256 of each, in every dtype."""

import numpy as np
import pytest
import torch
from olmo_mxfp8 import MXTensor, dequantize
from olmo_mxfp8.reference import decode_scales


def every_code_and_byte(element, dtype):
    """Row b holds all 256 codes under scale byte b."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(dtype)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    return MXTensor(codes, scales, 1, element)


@pytest.fixture
def expected(oracle, request):
    elements = [oracle.element(code, request.param) for code in range(256)]
    return np.array([[oracle.scale(b) * p for p in elements] for b in range(256)])


def test_scale_bytes_mean_powers_of_two(oracle):
    decoded = decode_scales(torch.arange(256, dtype=torch.uint8))
    torch.testing.assert_close(
        decoded.double(),
        torch.tensor([oracle.scale(b) for b in range(256)]).double(),
        rtol=0,
        atol=0,
        equal_nan=True,
    )
    assert decoded.view(torch.int32)[0] == 0x00400000  # 2^-127, not the 0 of a plain shift
    assert decoded[255].isnan()  # not the infinity of a plain shift


def test_reciprocal_of_a_scale_is_another_scale():
    bytes_ = torch.arange(255, dtype=torch.uint8)
    assert (decode_scales(bytes_).double() * decode_scales(254 - bytes_) == 1).all()


@pytest.mark.parametrize("expected", ["e4m3", "e5m2"], indirect=True)
def test_every_code_under_every_byte(expected, oracle, request):
    element = request.node.callspec.params["expected"]
    t = every_code_and_byte(element, oracle.dtype[element])
    in_float64 = dequantize(t, torch.float64).numpy()
    np.testing.assert_array_equal(in_float64, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(in_float64[number]), np.signbit(expected[number]))

    with np.errstate(over="ignore"):
        expected_32 = expected.astype(np.float32)  # beyond the largest: infinite
    in_float32 = dequantize(t).numpy()
    np.testing.assert_array_equal(in_float32, expected_32)
    assert np.isinf(in_float32).sum() > np.isinf(expected).sum()  # overflow did occur

    bits = expected_32.view(np.uint32).astype(np.int64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16  # to nearest even, by hand
    in_bfloat16 = dequantize(t, torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(
        in_bfloat16[number], rounded.astype(np.uint32).view(np.float32)[number]
    )
    assert np.isnan(in_bfloat16[~number]).all()

    with np.errstate(over="ignore"):
        expected_16 = expected_32.astype(np.float16)
    np.testing.assert_array_equal(dequantize(t, torch.float16).numpy(), expected_16)


def test_one_at_the_smallest_scale_is_not_zero():
    t = MXTensor(
        torch.full((1, 32), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.zeros(1, 1, dtype=torch.uint8),
        1,
        "e4m3",
    )
    assert (dequantize(t).double() == 2.0**-127).all()


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_dimension(dim):
    data = torch.randint(0, 126, (64, 96, 32), dtype=torch.uint8).view(torch.float8_e4m3fn)
    shape = [64, 96, 32]
    shape[dim] //= 32
    scales = torch.randint(100, 150, shape, dtype=torch.uint8)
    got = dequantize(MXTensor(data, scales, dim, "e4m3"))
    factor = torch.exp2(scales.double() - 127).repeat_interleave(32, dim)
    assert torch.equal(got.double(), data.double() * factor)
    assert got.is_contiguous()


def test_integer_output_is_refused():
    t = every_code_and_byte("e4m3", torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="`dtype` must be float32, bfloat16, float16 or float64"):
        dequantize(t, torch.int32)


class TestMXTensor:
    data = torch.zeros(3, 64, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(3, 2, dtype=torch.uint8)

    def test_shape_device_and_move(self):
        t = MXTensor(self.data, self.scales, 1, "e4m3")
        assert t.shape == (3, 64)
        assert t.device == torch.device("cpu")
        moved = t.to("meta")
        assert moved.device.type == "meta"
        assert (moved.shape, moved.dim, moved.element) == (t.shape, 1, "e4m3")

    def test_is_frozen(self):
        with pytest.raises(AttributeError):
            MXTensor(self.data, self.scales, 1, "e4m3").dim = 0  # type: ignore[misc]

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"element": "e3m4"}, ValueError, "`element` must be 'e4m3' or 'e5m2', got 'e3m4'"),
            ({"element": "e5m2"}, TypeError, "`data` must be torch.float8_e5m2 for element 'e5m2'"),
            ({"scales": scales.float()}, TypeError, "`scales` must be torch.uint8.*view"),
            ({"dim": -1}, ValueError, r"`dim` must be in \[0, 2\), got -1"),
            ({"dim": 2}, ValueError, r"`dim` must be in \[0, 2\), got 2"),
            ({"dim": 0}, ValueError, r"`scales` must hold one byte for each 32 .*\(3, 2\)"),
            ({"scales": scales[:, :1]}, ValueError, r"\(3, 64\), got \(3, 1\)"),
            ({"data": data[:, :40]}, ValueError, r"\(3, 40\), got \(3, 2\)"),
        ],
    )
    def test_bad_parts_are_refused(self, change, error, message):
        parts = {"data": self.data, "scales": self.scales, "dim": 1, "element": "e4m3", **change}
        with pytest.raises(error, match=message):
            MXTensor(**parts)
