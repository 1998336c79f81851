"""Products of two quantised operands, against float64 and against poisoned memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_mxfp8 import (
    MXTensor,
    _product_impl,
    _product_kernels,
    dequantize,
    quantize,
    scaled_grouped_mm,
    scaled_mm,
)


def offsets(*sizes):
    return torch.tensor(sizes).cumsum(0).int()


def exact(a, b):
    """The product of the quantised values in float64, and a bound on a float32 sum of it."""
    a, b = dequantize(a, torch.float64), dequantize(b, torch.float64)
    return a @ b.mT, (a.abs() @ b.mT.abs()) * a.shape[-1] * 2.0**-24


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(1, 4)),
    elements=st.tuples(st.sampled_from(["e4m3", "e5m2"]), st.sampled_from(["e4m3", "e5m2"])),
)
def test_product_of_the_quantised_values(seed, shape, elements):
    m, n, blocks = shape
    g = torch.Generator().manual_seed(seed)
    a = quantize(torch.randn(m, 32 * blocks, generator=g), element=elements[0])
    b = quantize(torch.randn(n, 32 * blocks, generator=g), element=elements[1])
    expected, bound = exact(a, b)
    got = scaled_mm(a, b, out_dtype=torch.float32)
    assert got.dtype == torch.float32
    assert ((got - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_is_rounded_once(dtype):
    a, b = quantize(torch.randn(5, 96)), quantize(torch.randn(7, 96))
    got = scaled_mm(a, b, out_dtype=dtype)
    assert torch.equal(got, scaled_mm(a, b, out_dtype=torch.float32).to(dtype))
    assert scaled_mm(a, b).dtype == torch.bfloat16
    grouped = scaled_grouped_mm(a, stack(b), offsets(5), out_dtype=dtype)
    assert torch.equal(grouped, got)


def stack(*bs):
    data, scales = torch.stack([b.data for b in bs]), torch.stack([b.scales for b in bs])
    return MXTensor(data, scales, 2, bs[0].element)


def test_small_integers_multiply_exactly():
    a, b = torch.randint(-15, 16, (13, 64)).float(), torch.randint(-15, 16, (6, 64)).float()
    got = scaled_mm(quantize(a), quantize(b), out_dtype=torch.float32)
    assert torch.equal(got.double(), a.double() @ b.double().T)


def test_the_smallest_scale_still_counts():
    a = quantize(torch.full((1, 128), 2.0**-127))
    assert (a.scales == 0).all()
    b = quantize(torch.full((1, 128), 2.0**120))
    assert scaled_mm(a, b, out_dtype=torch.float32).item() == 1.0


def test_nan_stays_in_its_row_and_its_expert():
    x, w = torch.randn(6, 64), torch.randn(3, 5, 64)
    x[1, 40], w[2, 3, 0] = torch.nan, torch.inf
    y = scaled_grouped_mm(quantize(x), quantize(w), offsets(2, 2, 2))
    bad = torch.zeros(6, 5, dtype=torch.bool)
    bad[1], bad[4:, 3] = True, True
    assert torch.equal(y.isnan(), bad)


@pytest.mark.parametrize(
    "sizes",
    [(5, 32, 27), (0, 5, 3), (5, 0, 0, 3), (4, 0), (0, 0, 0), (7,), (33, 31, 0, 64), (1, 1, 1)],
)
@pytest.mark.parametrize("spare", [0, 7])
def test_groups_of_any_size_and_a_tail_that_is_not_read(sizes, spare):
    total = sum(sizes)
    x, w = torch.randn(total + spare, 64), torch.randn(len(sizes), 6, 64)
    a, b = quantize(x), quantize(w)
    a.data.view(torch.uint8)[total:] = 0x7F  # NaN
    a.scales[total:] = 255
    got = scaled_grouped_mm(a, b, offsets(*sizes), out_dtype=torch.float32)
    assert got.shape == (total + spare, 6)
    assert torch.equal(got[total:], torch.zeros(spare, 6))
    start = 0
    for e, size in enumerate(sizes):
        rows = MXTensor(a.data[start : start + size], a.scales[start : start + size], 1, "e4m3")
        expected, bound = exact(rows, MXTensor(b.data[e], b.scales[e], 1, "e4m3"))
        assert ((got[start : start + size] - expected).abs() <= bound).all(), f"expert {e}"
        start += size


def test_scales_of_any_strides():
    a, b = quantize(torch.randn(8, 128)), quantize(torch.randn(4, 128))
    strided = MXTensor(a.data.T.contiguous().T, a.scales.T.contiguous().T, 1, "e4m3")
    assert not strided.scales.is_contiguous()
    assert torch.equal(scaled_mm(strided, b), scaled_mm(a, b))


def test_autocast_does_not_round_the_sum():
    a, b = quantize(torch.randn(4, 256)), quantize(torch.randn(3, 256))
    expected = scaled_mm(a, b, out_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(scaled_mm(a, b, out_dtype=torch.float32), expected)


class TestAuto:
    """Which implementation "auto" takes, on devices that need not be here."""

    @staticmethod
    def pick(granularities=(128, "128x128"), width=64):
        device = torch.device("cuda", 0)
        return _product_impl.pick_product("auto", device, granularities, 4, 2, width)

    def test_it_takes_the_first_that_can_run(self, monkeypatch):
        monkeypatch.setattr(_product_kernels, "why_no_kernel", lambda device, index: None)
        for capability, expected in [((9, 0), "coarse"), ((10, 0), "dequantise")]:
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
            assert self.pick() == expected
            assert self.pick((32, 32)) == self.pick((128, 128)) == "dequantise"
            assert self.pick(width=12) == "reference"

    def test_the_units_that_each_is_for(self, monkeypatch):
        """Named, it runs on the generations that have them and says which those are elsewhere."""
        monkeypatch.setattr(_product_kernels, "why_no_kernel", lambda device, index: None)
        device, coarse = torch.device("cuda", 0), (128, "128x128")
        units = {"coarse": ([9], "9.x"), "native": ([10, 12], "10.x or 12.x")}
        for major, minor in [(8, 0), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]:
            capability = (major, minor)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
            for impl, (majors, names) in units.items():
                arguments = (impl, device, coarse, 4, 2, 64)
                if major in majors:
                    assert _product_impl.pick_product(*arguments) == impl
                    continue
                message = f"`impl='{impl}'` cannot run: it is for compute capability {names}, this"
                with pytest.raises(ValueError, match=f"{message} device has .{major}, {minor}"):
                    _product_impl.pick_product(*arguments)

    @pytest.mark.parametrize(
        ("impl", "message"),
        [
            ("triton", r"`impl` must be one of \('auto', 'reference', .*got 'triton'"),
            ("dequantise", "`impl='dequantise'` cannot run: it runs on CUDA, not on cpu; use"),
            ("coarse", "`impl='coarse'` cannot run: it runs on CUDA, not on cpu"),
            ("native", "`impl='native'` cannot run: it runs on CUDA, not on cpu"),
        ],
    )
    def test_a_named_one_that_cannot_run_is_refused(self, impl, message):
        a, b = quantize(torch.zeros(4, 64)), quantize(torch.zeros(8, 64))
        with pytest.raises(ValueError, match=message):
            scaled_mm(a, b, impl=impl)
        with pytest.raises(ValueError, match=message):
            scaled_grouped_mm(a, stack(b), offsets(4), impl=impl)


class TestRefusals:
    a = quantize(torch.zeros(4, 64))
    b = quantize(torch.zeros(3, 64))
    experts = quantize(torch.zeros(2, 3, 64))

    @pytest.mark.parametrize(
        ("a", "b", "message"),
        [
            (a, experts, r"`a` must be \(M, K\) and `b` \(N, K\), got \(4, 64\) and \(2, 3, 64\)"),
            (a, quantize(torch.zeros(3, 96)), r"same last dimension, got \(4, 64\) and \(3, 96\)"),
            (quantize(torch.zeros(32, 64), dim=0), b, "`a` must be quantised along its last"),
            (a, quantize(torch.zeros(32, 64), dim=0), "`b` must be quantised along its last"),
            (a, b.to("meta"), "`a` and `b` must be on one device, got cpu and meta"),
        ],
    )
    def test_operands_that_do_not_fit(self, a, b, message):
        with pytest.raises(ValueError, match=message):
            scaled_mm(a, b)

    def test_grouped_operands_that_do_not_fit(self):
        with pytest.raises(ValueError, match=r"`b` \(E, N, K\), got \(4, 64\) and \(3, 64\)"):
            scaled_grouped_mm(self.a, self.b, offsets(4))

    def test_output_dtypes(self):
        for call in (
            lambda: scaled_mm(self.a, self.b, out_dtype=torch.float64),
            lambda: scaled_grouped_mm(self.a, self.experts, offsets(2, 2), out_dtype=torch.int8),
        ):
            with pytest.raises(TypeError, match="`out_dtype` must be bfloat16, float16 or float32"):
                call()

    @pytest.mark.parametrize(
        ("ends", "error", "message"),
        [
            (torch.tensor([2, 4]), TypeError, r"`offsets_E` must be int32, got torch.int64; .*int"),
            (torch.tensor([4]).int(), ValueError, r"one end for each .* \(2,\), got \(1,\)"),
            (torch.tensor([[2, 4]]).int(), ValueError, r"\(2,\), got \(1, 2\)"),
            (torch.tensor([3, 2]).int(), ValueError, "must ascend from at least 0 to at most .* 4"),
            (torch.tensor([-1, 2]).int(), ValueError, "must ascend"),
            (torch.tensor([2, 5]).int(), ValueError, "must ascend"),
            (torch.tensor([2, 4]).int().to("meta"), ValueError, "on the device of the rows, cpu"),
        ],
    )
    def test_offsets(self, ends, error, message):
        with pytest.raises(error, match=message):
            scaled_grouped_mm(self.a, self.experts, ends)
