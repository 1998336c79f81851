"""Experts and quantised layers in a split backward, whose weight gradients a reducer waits for."""

import pytest
import torch
from olmo_distopt import GradientReducer, ReplicaGroups
from olmo_experts_gemm import Experts
from olmo_mxfp8 import MXExperts, MXLinear
from olmo_pipeline import PipelineExecutor, one_f_one_b, zero_bubble
from torch import nn

D, H, E, ROWS = 32, 64, 3, 12
OFFSETS = torch.tensor([4, 4, 10], dtype=torch.int32)


class Layers(nn.Module):
    """A stage of one layer of each kind, the first of which reads what needs no gradient."""

    def __init__(self):
        super().__init__()
        self.linear, self.quantised = MXLinear(D, D), MXExperts(E, D, H)
        self.experts = Experts(E, D, H)

    def forward(self, hidden, rows):
        y = self.quantised(self.linear(rows), OFFSETS)
        return self.experts(y, OFFSETS).square().sum(), None


def _train(schedule, *, overlap, into_buffers):
    torch.manual_seed(0)
    layers = Layers()
    groups = ReplicaGroups({"all": None}, lambda *_: "all")
    # A bucket a parameter: each starts its reduction as soon as its last gradient is there.
    reducer = GradientReducer(
        list(layers.named_parameters()), groups, bucket_bytes=1, overlap=overlap
    )
    executor = PipelineExecutor(schedule, {0: layers}, device="cpu", dtype=torch.float32)
    for layer in layers.children():
        layer.defer = executor.defer
    if into_buffers:
        stacks = (layers.experts.w_gate_up_E2HD, layers.experts.w_down_EDH)
        pair = tuple(stack.main_grad for stack in stacks)
        layers.experts.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "main_grads": pair}), with_kwargs=True
        )
    batch = [torch.randn(ROWS, D) for _ in range(schedule.num_microbatches)]
    executor.run(batch, activation_shape=())
    reducer.reduce()
    return {name: vars(each)["main_grad"].clone() for name, each in layers.named_parameters()}


@pytest.mark.parametrize("into_buffers", [False, True])
def test_a_reducer_that_overlaps_waits_for_them(into_buffers):
    """An input gradient that ran the hooks of a weight would count as that weight's gradient."""
    options = {"into_buffers": into_buffers}
    whole = _train(one_f_one_b(1, 1), overlap=False, **options)
    split = _train(zero_bubble(1, 1), overlap=True, **options)
    for name, gradient in whole.items():
        assert gradient.any(), name
        assert torch.equal(split[name], gradient), name


def test_microbatches_are_summed_as_by_a_whole_backward():
    whole = _train(one_f_one_b(1, 3), overlap=False, into_buffers=False)
    split = _train(zero_bubble(1, 3), overlap=False, into_buffers=False)
    assert all(torch.equal(split[name], gradient) for name, gradient in whole.items())
