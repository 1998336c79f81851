"""The fused SwiGLU kernels against the reference.

Run on a GPU; on a CPU `test_interpreter.py` runs this file once in Triton's interpreter.
"""

import pytest
import torch
from mx_kernel_setting import DEVICE, INTERPRETED, KERNEL_MARKS
from olmo_mxfp8 import dequantize, swiglu_quantize, swiglu_quantize_backward

pytestmark = KERNEL_MARKS
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]
SHAPES = [(1, 256), (70, 256), (33, 768)]


def _inputs(R, F, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(R, F, generator=g) * 3
    d_act = torch.randn(R, F // 2, generator=g)
    hidden[0, :40], d_act[0, 50:90] = 0, 0
    if R > 4:
        hidden[2, 33], hidden[3, F // 2 + 1], d_act[4, 5] = torch.nan, torch.inf, torch.nan
    return hidden.to(dtype), d_act.to(dtype), torch.rand(R, generator=g)


def _assert_close(got, want):
    """The same scales, and codes that differ in few places, where another exponential rounds."""
    got = got.to("cpu")
    assert (got.dim, got.granularity) == (want.dim, want.granularity)
    assert (got.scales != want.scales).double().mean() < 2e-3
    assert torch.equal(dequantize(got).isnan(), dequantize(want).isnan())
    codes = [t.data.view(torch.uint8).int() for t in (got, want)]
    assert (codes[0] != codes[1]).double().mean() < 2e-3
    a, b = (dequantize(t).nan_to_num() for t in (got, want))
    step = {"e4m3": 2**-3, "e5m2": 2**-2}[want.element]
    scale = torch.exp2(want.scales.double() - 127).repeat_interleave(32, 1).nan_to_num()
    assert ((a - b).abs() <= step * b.abs() + 2**-9 * scale).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", [32, 128])
@pytest.mark.parametrize(("element", "rule"), [("e4m3", "rceil"), ("e5m2", "floor")])
def test_the_kernels_are_near_the_reference(element, rule, granularity, dtype):
    case = {"element": element, "scale_rule": rule, "granularity": granularity}
    for R, F in SHAPES:
        hidden, d_act, weights = _inputs(R, F, dtype)
        on_device = [t.to(DEVICE) for t in (hidden, d_act, weights)]
        for w, w_on_device in ((None, None), (weights, on_device[2])):
            _assert_close(
                swiglu_quantize(on_device[0], row_weights_R=w_on_device, **case, impl="triton"),
                swiglu_quantize(hidden, row_weights_R=w, **case, impl="reference"),
            )
            got, d_weights = swiglu_quantize_backward(
                on_device[1], on_device[0], row_weights_R=w_on_device, **case, impl="triton"
            )
            want, expected = swiglu_quantize_backward(
                d_act, hidden, row_weights_R=w, **case, impl="reference"
            )
            _assert_close(got, want)
            if w is None:
                assert d_weights is None
            else:
                torch.testing.assert_close(
                    d_weights.cpu(), expected, rtol=1e-4, atol=1e-3, equal_nan=True
                )


def test_layouts_and_nothing():
    hidden, d_act, weights = _inputs(8, 256, torch.float32)
    want = swiglu_quantize(hidden, row_weights_R=weights)
    strided = hidden.T.contiguous().T.to(DEVICE)
    got = swiglu_quantize(strided, row_weights_R=weights.to(DEVICE), impl="triton")
    _assert_close(got, want)
    empty = [t[:0].to(DEVICE) for t in (hidden, d_act, weights)]
    assert swiglu_quantize(empty[0], impl="triton").scales.shape == (0, 4)
    t, d_weights = swiglu_quantize_backward(
        empty[1], empty[0], row_weights_R=empty[2], impl="triton"
    )
    assert (t.shape, d_weights.shape) == ((0, 256), (0,))


def test_operators_keep_the_rules_of_torch():
    hidden, d_act, weights = _inputs(3, 256, torch.float32)
    hidden, d_act, weights = (t.to(DEVICE) for t in (hidden, d_act, weights))
    operators = torch.ops.olmo_mxfp8
    options = ("e4m3", True, 32)
    torch.library.opcheck(operators.swiglu_quantize.default, (hidden, weights, *options))
    torch.library.opcheck(operators.swiglu_quantize.default, (hidden, None, *options))
    arguments = (d_act, hidden, weights, *options)
    torch.library.opcheck(operators.swiglu_quantize_backward.default, arguments)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter is not for large tensors")
def test_addresses_past_32_bits():
    hidden = torch.zeros(2**20 + 64, 4096, device=DEVICE, dtype=torch.bfloat16)
    hidden[-64:] = torch.randn(64, 4096, device=DEVICE)
    d_act = torch.zeros(2**20 + 64, 2048, device=DEVICE, dtype=torch.bfloat16)
    d_act[-64:] = torch.randn(64, 2048, device=DEVICE)
    got = swiglu_quantize(hidden, impl="triton")
    last = type(got)(got.data[-64:], got.scales[-64:], 1, "e4m3")
    _assert_close(last, swiglu_quantize(hidden[-64:].cpu()))
    got, _ = swiglu_quantize_backward(d_act, hidden, impl="triton")
    last = type(got)(got.data[-64:], got.scales[-64:], 1, "e4m3")
    _assert_close(last, swiglu_quantize_backward(d_act[-64:].cpu(), hidden[-64:].cpu())[0])
