"""SwiGLU feed-forward: `down(silu(gate(x)) * up(x))` (Shazeer, arXiv 2002.05202)."""

import torch
from torch import nn
from torch.nn import functional as F


class FeedForward(nn.Module):
    """A dense block's layer, or the shared expert of a routed one; (..., D) to (..., D)."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.gate_up: nn.Linear = nn.Linear(d_model, 2 * hidden, bias=False)
        self.down: nn.Linear = nn.Linear(hidden, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to every position."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
