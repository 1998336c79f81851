"""An expert layer keeps its activations in MXFP8: two packages that know nothing of each other."""

import pytest
import torch
from olmo_experts_gemm import Experts, moe_mlp, swiglu_experts
from olmo_mxfp8 import MXPacker, dequantize, quantize

E, D, H = 3, 64, 32
OFFSETS = torch.tensor([5, 5, 12], dtype=torch.int32)
IMPLS = ["reference", "torch"]


class _Rounding:
    """What `MXPacker` means, in ordinary tensors."""

    def pack(self, tensor):
        return dequantize(quantize(tensor), tensor.dtype)

    def unpack(self, packed):
        return packed


class _Counting:
    def __init__(self):
        self.packer, self.held = MXPacker(), []

    def pack(self, tensor):
        packed = self.packer.pack(tensor)
        self.held.append((tuple(tensor.shape), tensor.nbytes, packed.nbytes))
        return packed

    def unpack(self, packed):
        return self.packer.unpack(packed)


@pytest.fixture
def leaves():
    draw = torch.Generator().manual_seed(0)
    shapes = {"x": (12, D), "up": (E, 2 * H, D), "down": (E, D, H), "weights": (12,)}
    scales = {"x": 1.0, "up": D**-0.5, "down": H**-0.5, "weights": 1.0}
    return {
        name: (torch.randn(*shape, generator=draw) * scales[name]).requires_grad_()
        for name, shape in shapes.items()
    }


def _run(leaves, impl="reference", **options):
    x, up, down, weights = leaves.values()
    y = swiglu_experts(x, up, down, OFFSETS, row_weights_R=weights, impl=impl, **options)
    return y, torch.autograd.grad(y.square().sum(), list(leaves.values()))


@pytest.mark.parametrize("impl", IMPLS)
def test_the_forward_is_untouched_and_gradients_are_those_of_the_rounded_activations(leaves, impl):
    plain, exact = _run(leaves, impl)
    y, gradients = _run(leaves, impl, pack=MXPacker())
    _, rounded = _run(leaves, impl, pack=_Rounding())
    assert torch.equal(y, plain)
    for name, got, want, high in zip(leaves, gradients, rounded, exact, strict=True):
        assert torch.equal(got, want), name
        assert (got - high).norm() < 0.06 * high.norm(), name
    assert not torch.equal(gradients[0], exact[0])
    assert not torch.equal(gradients[1], exact[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_takes_33_bytes_in_place_of_64(leaves, dtype):
    half = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in leaves.items()}
    packer = _Counting()
    _run(half, "torch", pack=packer)
    held = {shape: (before, after) for shape, before, after in packer.held}
    assert (12, D) in held
    assert any(shape[1] in (H, 2 * H) for shape in held), "the pre-activations are packed too"
    for before, after in held.values():
        assert after * 64 == before * 33


def test_the_module_and_the_whole_layer_take_it():
    draw = torch.Generator().manual_seed(1)
    experts = Experts(E, D, H)
    experts.reset_parameters(generator=draw)
    x = torch.randn(12, D, generator=draw, requires_grad=True)
    weights = torch.ones(12, 2)
    ids = torch.tensor([[0, 2], [2, -1], [1, 0]] * 4)
    calls = {
        "module": lambda pack: experts(x, OFFSETS, pack=pack),
        "layer": lambda pack: moe_mlp(
            x, ids, weights, experts.w_gate_up_E2HD, experts.w_down_EDH, pack=pack
        ),
    }
    for name, call in calls.items():
        results = []
        for pack in (MXPacker(), _Rounding(), None):
            (dx,) = torch.autograd.grad(call(pack).square().sum(), x)
            results.append(dx)
        assert torch.equal(results[0], results[1]), name
        assert not torch.equal(results[0], results[2]), name


def test_widths_that_no_block_divides_are_refused(leaves):
    narrow = {
        "x": torch.randn(12, 40, requires_grad=True),
        "up": torch.randn(E, 2 * H, 40, requires_grad=True),
        "down": torch.randn(E, 40, H, requires_grad=True),
        "weights": leaves["weights"],
    }
    with pytest.raises(ValueError, match=r"must be a multiple of 32 .* got 40"):
        _run(narrow, pack=MXPacker())
