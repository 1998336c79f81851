"""Layers of routed experts in plain torch, with every expert equally loaded, as stages use them.

Shapes: T tokens a microbatch, D model, E experts, K experts a token, H expert hidden width.
Routing is fixed and balanced (T K / E rows an expert): what is measured is the pipeline.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from olmo_pipeline import SplitRule
from torch import Tensor, nn


class Shape(NamedTuple):
    """One model and its microbatches."""

    num_layers: int
    d_model: int
    num_experts: int
    top_k: int
    hidden: int
    tokens: int
    num_microbatches: int


SHAPES = {
    "full": Shape(8, 4096, 32, 4, 2560, 4096, 8),
    "dry": Shape(8, 32, 4, 2, 48, 64, 8),
}


class ExpertLayer(nn.Module):
    """x + (projection and balanced experts of the normed x), (T, D)."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        made = {"device": device, "dtype": dtype}
        width, experts, hidden = shape.d_model, shape.num_experts, shape.hidden
        self.norm = nn.RMSNorm(width, **made)
        self.projection = nn.Linear(width, width, bias=False, **made)
        self.gate_up_EDH2 = nn.Parameter(torch.randn(experts, width, 2 * hidden, **made) * 0.02)
        self.down_EHD = nn.Parameter(torch.randn(experts, hidden, width, **made) * 0.02)
        # Row r of expert e is copy (r, e) of the tokens in a fixed order.
        tokens = torch.arange(shape.tokens, device=device).repeat(shape.top_k)
        self.register_buffer("rows_ER", tokens.view(-1, experts).T.contiguous())

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the layer's output, (T, D)."""
        normed = self.projection(self.norm(x_TD))
        rows_ERD = normed[self.rows_ER]
        gate, up = torch.bmm(rows_ERD, self.gate_up_EDH2).chunk(2, -1)
        out_ERD = torch.bmm(nn.functional.silu(gate) * up, self.down_EHD)
        return x_TD.index_add(0, self.rows_ER.flatten(), out_ERD.flatten(0, 1))


def _bmm_input(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(gradient, weight.mT)


def _bmm_weights(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (torch.bmm(x.mT, gradient),)


SPLIT_RULES = {torch.bmm: SplitRule(_bmm_input, _bmm_weights)}


class Stage(nn.Module):
    """Some layers; the last stage returns a scalar loss."""

    def __init__(self, layers: Sequence[nn.Module], *, is_last: bool) -> None:
        super().__init__()
        self.layers, self.is_last = nn.Sequential(*layers), is_last

    def forward(self, hidden: Tensor | None, microbatch: Tensor) -> tuple[Tensor, None]:
        """Return (activation or loss, None), as the executor wants it."""
        output = self.layers(microbatch if hidden is None else hidden)
        return (loss_of(output) if self.is_last else output), None


def loss_of(output: Tensor, target: Tensor | None = None) -> Tensor:
    """Return a scalar; the target is there for the peer's call form."""
    return output.float().square().mean()
