"""What stands for a pipeline in tests: it says that weight gradients may wait, and runs them."""

import weakref

import torch
from torch import nn


class Postponed:
    """A `defer` that keeps what it is handed.

    Attributes:
        asked: The weights of each call.
        waiting: Weights and function of each backward.
    """

    def __init__(self, waits=True):
        self.waits, self.asked, self.waiting = waits, [], []

    def __call__(self, weights):
        assert isinstance(weights, tuple)
        assert weights
        assert all(isinstance(w, nn.Parameter) and w.requires_grad for w in weights)
        self.asked.append(weights)
        return (lambda compute: self.waiting.append((weights, compute))) if self.waits else None

    def run(self):
        """Compute what waits, in order, and add it to `.grad`; return how many calls that was."""
        done, self.waiting = self.waiting, []
        for weights, compute in done:
            made = compute()
            assert len(made) == len(weights)
            for weight, gradient in zip(weights, made, strict=True):
                if gradient is not None:
                    assert gradient.shape == weight.shape
                    assert gradient.dtype == weight.dtype
                    weight.grad = gradient if weight.grad is None else weight.grad + gradient
        return len(done)


class _Marked(torch.autograd.Function):
    """The identity; its node in the graph owns an object that can be watched."""

    @staticmethod
    def forward(ctx, x, marker):
        ctx.marker = marker
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Marker:
    pass


def marked(x):
    """`x` behind a node of the graph, and a reference that dies with that node."""
    marker = _Marker()
    return _Marked.apply(x, marker), weakref.ref(marker)
