"""`MXPacker`: what it holds and what it gives back."""

import pytest
import torch
from olmo_mxfp8 import MXPacker, dequantize, quantize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"element": "e5m2", "scale_rule": "floor"}])
def test_gives_back_the_rounded_activation(dtype, options):
    packer = MXPacker(**options)
    x = torch.randn(5, 256).to(dtype)
    packed = packer.pack(x)
    kept = [packer.unpack(packed) for _ in range(2)]
    for back in kept:
        assert (back.shape, back.dtype, back.device) == (x.shape, x.dtype, x.device)
        assert torch.equal(back, dequantize(quantize(x, **options), dtype))
    assert packed.nbytes == 5 * 256 * 33 // 32


def test_shares_no_memory_and_reads_any_strides():
    x = torch.randn(8, 130)[:, 1:129]
    packed = MXPacker(granularity=128).pack(x)
    assert packed.values.granularity == 128
    want = dequantize(quantize(x.clone(), granularity=128))
    x.zero_()
    assert torch.equal(MXPacker().unpack(packed), want)


def test_a_row_that_nobody_reads_spoils_no_other():
    x = torch.randn(4, 64)
    want = MXPacker().unpack(MXPacker().pack(x))
    x[2], x[3] = torch.nan, torch.inf
    got = MXPacker().unpack(MXPacker().pack(x))
    assert torch.equal(got[:2], want[:2])
    assert got[2:].isnan().all()


def test_saved_tensor_hooks_of_torch_take_it():
    x = torch.randn(6, 64, requires_grad=True)
    packer = MXPacker()
    with torch.autograd.graph.saved_tensors_hooks(packer.pack, packer.unpack):
        y = x.square()
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, 2 * dequantize(quantize(x)))


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="`granularity` must be 32 or 128, got '128x128'"):
        MXPacker(granularity="128x128")
    with pytest.raises(ValueError, match="`element` must be 'e4m3' or 'e5m2'"):
        MXPacker(element="e3m4")
    with pytest.raises(ValueError, match="`scale_rule` must be"):
        MXPacker(scale_rule="ceil")
    with pytest.raises(TypeError, match="`tensor` must be float32, bfloat16 or float16"):
        MXPacker().pack(torch.zeros(2, 32).double())
    with pytest.raises(ValueError, match=r"`tensor.shape\[-1\]` must be .* of 32 .* got 40"):
        MXPacker().pack(torch.zeros(2, 40))
    with pytest.raises(ValueError, match="`tensor` must have rows to quantise along, got a scalar"):
        MXPacker().pack(torch.tensor(1.0))
    for packed in (3, None, torch.zeros(2, 32), quantize(torch.zeros(2, 32))):
        kind = type(packed).__name__
        with pytest.raises(TypeError, match=f"`packed` must be what `pack` returned, got {kind}"):
            MXPacker().unpack(packed)


@pytest.mark.parametrize(("element", "first"), [("e4m3", 63488), ("e5m2", 61440)])
@pytest.mark.parametrize("granularity", [32, 128])
def test_which_numbers_of_float16_come_back_infinite(element, first, granularity):
    every = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16)  # the finite ones
    x = every[:, None].expand(-1, 128)
    packer = MXPacker(element=element, granularity=granularity)
    lost = packer.unpack(packer.pack(x)).isinf().all(1)
    assert torch.equal(lost, every >= first)
    packer = MXPacker(element=element, granularity=granularity, scale_rule="floor")
    assert packer.unpack(packer.pack(x)).isfinite().all()
