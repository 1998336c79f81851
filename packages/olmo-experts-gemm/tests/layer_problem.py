"""Inputs and calls of the fused MLP that its tests share, for a GPU and for the interpreter.

Shapes: T tokens, K experts a token, E experts, D model width, H expert hidden width.
"""

import os

import pytest
import torch
from olmo_experts_gemm import moe_mlp, swiglu_experts

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NEEDS_GPU_OR_INTERPRETER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
    # numpy on the interpreter, which also multiplies what lies past an expert's rows.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]
LOW = torch.float16 if INTERPRETED else torch.bfloat16
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
T, K, E, D, H = (21, 2, 4, 24, 40) if INTERPRETED else (331, 3, 9, 136, 200)
NAMES = ("x", "weights", "w_gate_up", "w_down", "b_gate_up", "b_down")


def make_routes(seed=0, dropped=0.2, empty=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(T, E, generator=generator).argsort(dim=1)
    ids = torch.where(ids == empty, -1, ids)[:, :K].contiguous()
    ids[torch.rand(T, K, generator=generator) < dropped] = -1
    return ids


def make_tensors(device, dtype, activation="swiglu", bias=False, rows=T, weights=(T, K), seed=0):
    """The leaves, their values those of `dtype`, and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    width = H if activation == "relu_squared" else 2 * H

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    # Large enough for the clamps to bite.
    large = 4.0 if activation == "clamped_swiglu" else 1.0
    shapes = [(rows, D), weights, (E, width, D), (E, D, H), (E, width), (E, D)]
    scales = [1.0, 1.0, large * D**-0.5, H**-0.5, 0.5, 0.5]
    tensors = {
        name: normal(*shape, scale=scale)
        for name, shape, scale in zip(NAMES, shapes, scales, strict=True)
        if bias or not name.startswith("b_")
    }
    return tensors, normal(rows, D)


def layer_of(ids, activation="swiglu", impl="triton", **options):
    def run(x, weights, w_gate_up, w_down, b_gate_up=None, b_down=None):
        biases = {"b_gate_up_E2H": b_gate_up, "b_down_ED": b_down}
        stacks = (w_gate_up, w_down)
        return moe_mlp(
            x, ids, weights, *stacks, activation=activation, impl=impl, **biases, **options
        )

    return run


def rows_of(offsets, activation="swiglu", impl="triton", **options):
    def run(x, weights, w_gate_up, w_down, b_gate_up=None, b_down=None):
        biases = {"b_gate_up_E2H": b_gate_up, "b_down_ED": b_down}
        return swiglu_experts(
            x,
            w_gate_up,
            w_down,
            offsets,
            row_weights_R=weights,
            activation=activation,
            impl=impl,
            **biases,
            **options,
        )

    return run


def gradients_of(function, tensors, dy):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors.values()]
    y = function(*leaves)
    names = ("y", *tensors)
    return dict(zip(names, (y.detach(), *torch.autograd.grad(y, leaves, dy)), strict=True))


def assert_bits(got, want):
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def at_offset_one(tensor):
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view_as(tensor)
