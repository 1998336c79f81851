"""What stands for a pipeline in tests: it says that weight gradients may wait, and runs them."""

from torch import nn


class Postponed:
    """A `defer` that keeps what it is handed, and the weights that it was asked for."""

    def __init__(self, waits=True):
        self.waits, self.asked, self.waiting = waits, [], []

    def __call__(self, weights):
        assert weights
        assert all(isinstance(w, nn.Parameter) and w.requires_grad for w in weights)
        self.asked.append(weights)
        return (lambda compute: self.waiting.append((weights, compute))) if self.waits else None

    def run(self):
        """Compute what waits, in order, and add it to `.grad`; return how many calls that was."""
        done, self.waiting = self.waiting, []
        for weights, compute in done:
            for weight, gradient in zip(weights, compute(), strict=True):
                assert gradient.shape == weight.shape
                assert gradient.dtype == weight.dtype
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
        return len(done)
