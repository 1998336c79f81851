"""`swiglu_quantize` and its gradient, against float64 and against autograd."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_mxfp8 import dequantize, quantize, swiglu_quantize, swiglu_quantize_backward
from olmo_mxfp8.reference import swiglu, swiglu_gradients

few = settings(max_examples=15, deadline=None)
STEPS = {"e4m3": (2**-4, 2**-10), "e5m2": (2**-3, 2**-17)}


def rows(seed, *shape):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g) * 3
    return x * torch.exp2(torch.randn(shape[0], 1, generator=g) * 3)


def exact(hidden, weights):
    gate, up = hidden.double().chunk(2, dim=-1)
    act = torch.nn.functional.silu(gate) * up
    return act if weights is None else act * weights.double()[:, None]


def assert_within_half_a_step(t, want):
    """`t` holds `want` up to the rounding of its format and of float32 arithmetic."""
    relative, absolute = STEPS[t.element]
    scale = torch.exp2(t.scales.double() - 127).repeat_interleave(32, 1)
    error = (dequantize(t, torch.float64) - want).abs()
    bound = torch.maximum(relative * want.abs(), absolute * scale)
    assert (error <= bound * (1 + 2**-18) + 2**-18 * want.abs() + 1e-37).all()


options = {
    "element": st.sampled_from(["e4m3", "e5m2"]),
    "granularity": st.sampled_from([32, 128]),
    "weighted": st.booleans(),
}


@few
@given(seed=st.integers(0, 2**31), **options)
def test_the_activation_is_rounded_once(seed, element, granularity, weighted):
    hidden, weights = rows(seed, 5, 512), torch.rand(5) if weighted else None
    case = {"element": element, "granularity": granularity}
    t = swiglu_quantize(hidden, row_weights_R=weights, **case)
    assert (t.shape, t.dim, t.element, t.granularity) == ((5, 256), 1, element, granularity)
    assert_within_half_a_step(t, exact(hidden, weights))
    parts = quantize(swiglu(hidden, weights), **case)
    assert torch.equal(t.data.view(torch.uint8), parts.data.view(torch.uint8))
    assert torch.equal(t.scales, parts.scales)


@few
@given(seed=st.integers(0, 2**31), **options)
def test_the_gradient_is_that_of_autograd_in_float64(seed, element, granularity, weighted):
    hidden, d_act = rows(seed, 5, 512), rows(seed + 1, 5, 256)
    weights = torch.rand(5) if weighted else None
    t, d_weights = swiglu_quantize_backward(
        d_act, hidden, row_weights_R=weights, element=element, granularity=granularity
    )
    leaves = [hidden.double().requires_grad_()]
    if weights is not None:
        leaves.append(weights.double().requires_grad_())
    act = exact(leaves[0], leaves[1] if weighted else None)
    want = torch.autograd.grad(act, leaves, d_act.double())
    assert (t.shape, t.dim, t.element, t.granularity) == ((5, 512), 1, element, granularity)
    # The derivative of silu goes through 0, where float32 cancels: so relative to its factors.
    slack = 2**-20 * (d_act.double().abs() * (1 + hidden.double().abs().amax(1, keepdim=True)) ** 2)
    relative, absolute = STEPS[element]
    scale = torch.exp2(t.scales.double() - 127).repeat_interleave(32, 1)
    bound = torch.maximum(relative * want[0].abs(), absolute * scale) + slack.repeat(1, 2)
    assert ((dequantize(t, torch.float64) - want[0]).abs() <= bound).all()
    if weights is None:
        assert d_weights is None
    else:
        assert d_weights.dtype == torch.float32
        torch.testing.assert_close(d_weights.double(), want[1], rtol=1e-4, atol=1e-3)


def test_the_reference_gradient_passes_gradcheck_by_differences():
    """In float64: the formula itself, without quantisation."""
    hidden, weights = torch.randn(3, 8).double(), torch.rand(3).double()
    d_act = torch.randn(3, 4).double()
    got = swiglu_gradients(d_act, hidden, weights)
    for name, tensor, gradient in (("hidden", hidden, got[0]), ("weights", weights, got[1])):
        for at in range(tensor.numel()):
            step = torch.zeros_like(tensor).view(-1)
            step[at] = 1e-6
            moved = [tensor + sign * step.view(tensor.shape) for sign in (1, -1)]
            values = [
                (exact(m, weights) if name == "hidden" else exact(hidden, m)) * d_act for m in moved
            ]
            slope = ((values[0] - values[1]).sum() / 2e-6).item()
            assert gradient.view(-1)[at].item() == pytest.approx(slope, rel=1e-3, abs=1e-4)


def test_nan_stays_in_its_block():
    hidden = torch.randn(3, 128)
    hidden[1, 40] = torch.nan
    lost = torch.zeros(3, 64, dtype=torch.bool)
    lost[1, 32:] = True
    assert torch.equal(dequantize(swiglu_quantize(hidden)).isnan(), lost)
    t, _ = swiglu_quantize_backward(torch.ones(3, 64), hidden)
    assert torch.equal(dequantize(t).isnan(), torch.cat([lost, lost], 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_its_float32_value(dtype):
    hidden, d_act, weights = (torch.randn(shape).to(dtype) for shape in ((4, 128), (4, 64), (4,)))
    wide = swiglu_quantize(hidden.float(), row_weights_R=weights.float())
    assert torch.equal(dequantize(swiglu_quantize(hidden, row_weights_R=weights)), dequantize(wide))
    got = swiglu_quantize_backward(d_act, hidden, row_weights_R=weights)
    want = swiglu_quantize_backward(d_act.float(), hidden.float(), row_weights_R=weights.float())
    assert torch.equal(dequantize(got[0]), dequantize(want[0]))
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("num_rows", [0, 1])
def test_few_rows(num_rows):
    t = swiglu_quantize(torch.randn(num_rows, 128))
    assert t.shape == (num_rows, 64)
    weights = torch.ones(num_rows)
    d_hidden, d_weights = swiglu_quantize_backward(
        torch.randn(num_rows, 64), torch.randn(num_rows, 128), row_weights_R=weights
    )
    assert (d_hidden.shape, d_weights.shape) == ((num_rows, 128), (num_rows,))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"hidden_R2H": torch.zeros(4, 64).double()}, TypeError, "`hidden_R2H` must be float32"),
        ({"hidden_R2H": torch.zeros(4, 33)}, ValueError, r"`hidden_R2H` must be \(R, 2H\), .*33"),
        ({"hidden_R2H": torch.zeros(4, 96)}, ValueError, "H, half of .* multiple of 32 .* got 48"),
        ({"granularity": 128}, ValueError, "H, half of .* multiple of 128 .* got 64"),
        ({"granularity": "128x128"}, ValueError, "`granularity` must be 32 or 128, got '128x128'"),
        ({"element": "e3m4"}, ValueError, "`element` must be 'e4m3' or 'e5m2'"),
        ({"scale_rule": "ceil"}, ValueError, "`scale_rule` must be"),
        ({"row_weights_R": torch.zeros(3)}, ValueError, r"`row_weights_R` must be \(4,\) on cpu"),
        ({"row_weights_R": torch.zeros(4).int()}, TypeError, "`row_weights_R` must be float32"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(arguments, error, message):
    arguments = {"hidden_R2H": torch.zeros(4, 128), **arguments}
    with pytest.raises(error, match=message):
        swiglu_quantize(**arguments)
    hidden = arguments.pop("hidden_R2H")
    with pytest.raises(error, match=message):
        swiglu_quantize_backward(torch.zeros(4, hidden.shape[1] // 2), hidden, **arguments)


def test_a_gradient_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"`d_act_RH` must be \(4, 64\) on cpu.* got \(4, 32\)"):
        swiglu_quantize_backward(torch.zeros(4, 32), torch.zeros(4, 128))
    with pytest.raises(TypeError, match="`d_act_RH` must be float32"):
        swiglu_quantize_backward(torch.zeros(4, 64).int(), torch.zeros(4, 128))
