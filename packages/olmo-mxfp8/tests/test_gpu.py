"""The same bits on a GPU as on the CPU."""

import pytest
import torch
from mx_later import Postponed
from olmo_mxfp8 import (
    MXExperts,
    MXLinear,
    MXRecipe,
    MXTensor,
    dequantize,
    mx_grouped_mm,
    quantize,
    quantize_both,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_quantize_gives_the_same_bits(element, rule):
    """Bit patterns of all kinds: a device that flushes subnormal numbers would differ."""
    bits = torch.randint(-(2**31), 2**31, (4096, 128), dtype=torch.int32)
    bits[::2] &= -0x70000001  # and rows of small and subnormal numbers
    x = torch.cat([bits.view(torch.float32), torch.randn(512, 128)])
    t = quantize(x, element=element, scale_rule=rule)
    on_gpu = quantize(x.cuda(), element=element, scale_rule=rule)
    assert torch.equal(on_gpu.data.view(torch.uint8).cpu(), t.data.view(torch.uint8))
    assert torch.equal(on_gpu.scales.cpu(), t.scales)


@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("width", [32, 288, 4096])
def test_every_bfloat16_in_every_block(width, element, rule):
    """Each value beside larger ones of any size: what is scaled in bfloat16 must lose nothing."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16).repeat_interleave(width // 32)
    x = bits[torch.randperm(bits.numel())].view(torch.bfloat16).view(-1, width)
    x = torch.where(x.isfinite() | (torch.rand(x.shape) < 0.01), x, 1.0)
    x[: len(x) // 2] *= torch.exp2(torch.randint(-100, 100, (1, width)))
    rules = {"element": element, "scale_rule": rule}
    want = [quantize(x, dim=d, **rules, impl="reference") for d in (1, 0)]
    both = quantize_both(x.cuda(), **rules, impl="triton")
    columns = quantize(x.cuda(), dim=0, **rules, impl="triton")
    coarse = quantize(x.cuda(), dim=0, granularity=128, **rules, impl="triton")
    want += [want[1], quantize(x, dim=0, granularity=128, **rules, impl="reference")]
    for got, expected in zip((*both, columns, coarse), want, strict=True):
        assert torch.equal(got.data.view(torch.uint8).cpu(), expected.data.view(torch.uint8))
        assert torch.equal(got.scales.cpu(), expected.scales)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dequantize_gives_the_same_values(element, dtype):
    fp8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[element]
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(fp8)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    t = MXTensor(codes, scales, 1, element)
    got, expected = dequantize(t.to("cuda"), dtype).cpu(), dequantize(t, dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_small_integers_have_exact_products_and_gradients():
    x, w, dy = (
        torch.randint(-7, 8, shape, device="cuda").float()
        for shape in ((70, 128), (3, 256, 128), (70, 256))
    )
    x[60:], dy[60:] = torch.nan, torch.nan
    x.requires_grad_()
    w.requires_grad_()
    offsets_E = torch.tensor([37, 37, 60], dtype=torch.int32, device="cuda")
    y = mx_grouped_mm(x, w, offsets_E, recipe=MXRecipe(grad_element="e5m2"))
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    x, w, dy = x.detach().double(), w.detach().double(), dy.double()
    a, b = slice(0, 37), slice(37, 60)
    zeros = torch.zeros(10, 256, device="cuda")
    assert torch.equal(y.double(), torch.cat([x[a] @ w[0].T, x[b] @ w[2].T, zeros]))
    assert torch.equal(dx.double(), torch.cat([dy[a] @ w[0], dy[b] @ w[2], zeros[:, :128]]))
    expected_dw = [dy[a].T @ x[a], torch.zeros_like(w[1]), dy[b].T @ x[b]]
    assert torch.equal(dw.double(), torch.stack(expected_dw))


@pytest.mark.parametrize("impl", ["coarse", "dequantise"])
@pytest.mark.parametrize("weight_grad", ["high", "mxfp8"])
def test_deferred_weight_gradients_have_the_bits_of_one_backward(impl, weight_grad):
    if impl == "coarse" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9.x")
    granularity = 128 if impl == "coarse" else 32
    recipe = MXRecipe(impl=impl, granularity=granularity, saved="mxfp8", weight_grad=weight_grad)
    experts = MXExperts(
        4, 256, 128, recipe=recipe, cached=True, device="cuda", dtype=torch.bfloat16
    )
    linear = MXLinear(256, 256, recipe=recipe, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([70, 70, 300, 500], dtype=torch.int32, device="cuda")
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    weights, dy = torch.rand(512, device="cuda"), torch.randn_like(x)
    results = []
    for defer in (None, Postponed()):
        experts.defer = linear.defer = defer
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        parameters = [*experts.parameters(), *linear.parameters()]
        for parameter in parameters:
            parameter.grad = None
        y = experts(linear(leaves[0]), offsets, row_weights_R=leaves[1])
        y.backward(dy)
        if defer is not None:
            assert all(parameter.grad is None for parameter in parameters)
            assert defer.run() == 2
        results.append([y, *(leaf.grad for leaf in (*leaves, *parameters))])
    assert all(map(torch.equal, *results))
