"""What a packer is given, and what is refused of it; the Triton kernels have the same in theirs."""

import pytest
import torch
from olmo_experts_gemm import moe_mlp, swiglu_experts

IMPLS = ["reference", "torch"]
OFFSETS = torch.tensor([3, 3, 7], dtype=torch.int32)
IDS = torch.tensor([[0, 2], [2, -1], [0, 2], [-1, -1], [2, 0], [0, -1], [2, 0]])
R, D, H = 7, 8, 4


class _Packer:
    def __init__(self):
        self.shapes, self.unpacked = [], 0

    def pack(self, tensor):
        self.shapes.append(tuple(tensor.shape))
        return tensor.clone()

    def unpack(self, packed):
        self.unpacked += 1
        return packed


def _leaves(activation="swiglu"):
    draw = torch.Generator().manual_seed(0)
    width = H if activation == "relu_squared" else 2 * H
    shapes = {"x": (R, D), "up": (3, width, D), "down": (3, D, H), "weights": (R,)}
    return {
        name: torch.randn(*shape, generator=draw).requires_grad_() for name, shape in shapes.items()
    }


def _rows(leaves, offsets=OFFSETS, **options):
    x, up, down, weights = leaves.values()
    return swiglu_experts(x, up, down, offsets, row_weights_R=weights, **options)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("changed", ["up", "down", "offsets"])
def test_a_kept_tensor_that_changes_before_backward_is_an_error_as_without_a_packer(impl, changed):
    for options in ({}, {"pack": _Packer()}):
        leaves, offsets = _leaves(), OFFSETS.clone()
        y = _rows(leaves, offsets, impl=impl, **options)
        with torch.no_grad():
            {**leaves, "offsets": offsets}[changed].add_(1)
        message = r"modified by an inplace operation.* is at version 1; expected version 0 instead"
        with pytest.raises(RuntimeError, match=message):
            y.sum().backward()


def test_a_packed_tensor_may_change_before_backward():
    leaves = _leaves()
    want = torch.autograd.grad(_rows(leaves).sum(), leaves.values())
    y = _rows(leaves, pack=_Packer())
    with torch.no_grad():
        leaves["x"].zero_()
    for got, value in zip(torch.autograd.grad(y.sum(), leaves.values()), want, strict=True):
        assert torch.equal(got, value)


@pytest.mark.parametrize("impl", IMPLS)
def test_views_of_one_memory_are_told_apart(impl):
    """The rows and a stack lie in one storage: the one is packed, the other is not."""
    leaves = _leaves()
    flat = torch.cat([leaves["x"].detach().flatten(), leaves["up"].detach().flatten()])
    x, up = flat[: R * D].view(R, D), flat[R * D :].view(3, 2 * H, D)
    views = {**leaves, "x": x.requires_grad_(), "up": up.requires_grad_()}
    want, packer = torch.autograd.grad(_rows(leaves, impl=impl).sum(), leaves.values()), _Packer()
    y = _rows(views, impl=impl, pack=packer)
    assert packer.shapes[0] == (R, D)
    assert set(packer.shapes[1:]) == {(R, H)}
    for got, value in zip(torch.autograd.grad(y.sum(), views.values()), want, strict=True):
        torch.testing.assert_close(got, value)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_hidden_layer_without_a_gate_is_packed_once(impl):
    leaves, packer = _leaves("relu_squared"), _Packer()
    _rows(leaves, impl=impl, activation="relu_squared", pack=packer).sum().backward()
    assert packer.shapes == [(R, D), (R, H)]


@pytest.mark.parametrize(
    ("unpack", "error", "message"),
    [
        (lambda packed: None, TypeError, "`pack.unpack` must return a tensor, got NoneType"),
        (lambda packed: packed.double(), ValueError, "must return float32 of .*, got float64"),
        (lambda packed: packed[:2], ValueError, r"of shape \(7, \d\), got float32 of shape \(2, "),
        (lambda packed: packed.to("meta"), ValueError, "a tensor on cpu, .* got one on meta"),
    ],
)
def test_what_comes_back_must_be_like_what_was_packed(unpack, error, message):
    packer = _Packer()
    packer.unpack = unpack
    y = _rows(_leaves(), pack=packer)
    with pytest.raises(error, match=message):
        y.sum().backward()


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("layer", [True, False])
def test_a_compiled_call_refuses_a_packer(fullgraph, layer):
    x, up, down, _ = _leaves().values()

    def call(x):
        if layer:
            return moe_mlp(x, IDS, torch.ones(R, 2), up, down, pack=_Packer()) + 1
        return swiglu_experts(x, up, down, OFFSETS, pack=_Packer()) + 1

    compiled = torch.compile(call, backend="aot_eager", fullgraph=fullgraph)
    with pytest.raises(RuntimeError, match=r"`pack` must stay None under `torch.compile`, got a"):
        compiled(x)
    torch.compiler.reset()
