"""What buffers for weight gradients must be, when a call is made and when its backward runs."""

import pytest
import torch
from olmo_experts_gemm import grouped_mm, moe_mlp, swiglu_experts

IMPLS = ["reference", "torch"]
OFFSETS = torch.tensor([1, 3, 5], dtype=torch.int32)
IDS = torch.tensor([[0, 1], [2, -1], [1, 0], [-1, -1], [2, 1]])
SHAPES = {"up": (3, 8, 8), "down": (3, 8, 4)}


def _operands():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8, generator=draw).requires_grad_()
    stacks = [torch.randn(*s, generator=draw).requires_grad_() for s in SHAPES.values()]
    return x, *stacks


def _buffers():
    return [torch.zeros(*shape) for shape in SHAPES.values()]


def _calls(impl):
    x, up, down = _operands()
    return [
        lambda pair: swiglu_experts(x, up, down, OFFSETS, main_grads=pair, impl=impl),
        lambda pair: moe_mlp(x, IDS, torch.ones(5, 2), up, down, main_grads=pair, impl=impl),
    ]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("missing", [0, 1])
def test_one_buffer_alone_is_refused(impl, missing):
    buffers = _buffers()
    buffers[missing] = None
    for call in _calls(impl):
        with pytest.raises(TypeError, match=r"`main_grads` must be two tensors, .* got a NoneType"):
            call(tuple(buffers))


@pytest.mark.parametrize("impl", IMPLS)
def test_buffers_may_share_a_storage_but_not_memory(impl):
    x, up, down = _operands()
    sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
    flat = torch.zeros(sum(sizes))
    pair = [p.view(s) for p, s in zip(flat.split(sizes), SHAPES.values(), strict=True)]
    swiglu_experts(x, up, down, OFFSETS, main_grads=tuple(pair), impl=impl).sum().backward()
    assert all(buffer.any() for buffer in pair)
    overlapping = (pair[0], flat[sizes[0] - 1 : -1].view(SHAPES["down"]))
    own = (up.detach(), pair[1]), (pair[0], up.detach().flatten()[:96].view(SHAPES["down"]))
    for buffers, names in (
        (overlapping, r"`main_grads\[0\]` must not share memory with `main_grads\[1\]`"),
        (own[0], r"`main_grads\[0\]` must not share memory with `w_gate_up_E2HD`"),
        (own[1], r"`main_grads\[1\]` must not share memory with `w_gate_up_E2HD`"),
    ):
        with pytest.raises(ValueError, match=names):
            swiglu_experts(x, up, down, OFFSETS, main_grads=buffers, impl=impl)
    with pytest.raises(ValueError, match="`main_grad_EFD` must not share memory with `w_EFD`"):
        grouped_mm(x, up, OFFSETS, main_grad_EFD=up.detach(), impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda buffer: setattr(buffer, "data", buffer.data.half()), TypeError, "must be float32"),
        (lambda buffer: buffer.resize_(3, 8, 2), ValueError, r"got shape \(3, 8, 2\)"),
        (lambda buffer: buffer.requires_grad_(), ValueError, "must not require a gradient"),
    ],
)
def test_backward_looks_at_the_buffer_again(impl, change, error, message):
    for call in _calls(impl):
        for which in range(2):
            buffers = tuple(_buffers())
            y = call(buffers)
            change(buffers[which])
            with pytest.raises(error, match=f"`main_grad.*{message}"):
                y.sum().backward()
