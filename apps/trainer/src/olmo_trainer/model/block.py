"""The report's block: RMSNorm before and after each sublayer (peri-norm), residual around both.

`h = x + norm(attention(norm(x)))`, `y = h + norm(ffn(norm(h)))` (report, section 14-D).
"""

import torch
from olmo_routing import Routing
from torch import nn

from olmo_trainer.model.moe import MoE


class Block(nn.Module):
    """One layer of the model; x (B, S, D) to (B, S, D)."""

    def __init__(
        self, d_model: int, norm_eps: float, attention: nn.Module, feed_forward: nn.Module
    ) -> None:
        super().__init__()
        self.attention_in_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.attention = attention
        self.attention_out_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.feed_forward_in_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.feed_forward = feed_forward
        self.feed_forward_out_norm = nn.RMSNorm(d_model, eps=norm_eps)

    def forward(
        self, x_BSD: torch.Tensor, mask_BS: torch.Tensor
    ) -> tuple[torch.Tensor, Routing | None]:
        """Return the block's output and, for a routed block, its routing."""
        attended = self.attention(self.attention_in_norm(x_BSD))
        h_BSD = x_BSD + self.attention_out_norm(attended)
        normed = self.feed_forward_in_norm(h_BSD)
        routing = None
        if isinstance(self.feed_forward, MoE):
            y_TD, routing = self.feed_forward(normed.flatten(0, 1), mask_BS.flatten())
            out = y_TD.view_as(normed)
        else:
            out = self.feed_forward(normed)
        return h_BSD + self.feed_forward_out_norm(out), routing
