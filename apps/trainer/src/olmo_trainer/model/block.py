"""A block: RMSNorm before each sublayer, in the report's peri-norm after it too; residual around.

`h = x + norm(attention(norm(x)))`, `y = h + norm(ffn(norm(h)))` (report, section 14-D); OLMoE and
Qwen3-MoE are `pre`: without the outer norms.
"""

from typing import Literal

import torch
from olmo_routing import Routing
from torch import nn

from olmo_trainer.model.moe import MoE, RouteMemory
from olmo_trainer.model.visibility import Visibility


class Block(nn.Module):
    """One layer of the model; x (B, S, D) to (B, S, D)."""

    def __init__(
        self,
        d_model: int,
        norm_eps: float,
        attention: nn.Module,
        feed_forward: nn.Module,
        *,
        norms: Literal["peri", "pre"] = "peri",
    ) -> None:
        super().__init__()

        def out_norm() -> nn.Module:
            return nn.RMSNorm(d_model, eps=norm_eps) if norms == "peri" else nn.Identity()

        self.attention_in_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.attention = attention
        self.attention_out_norm = out_norm()
        self.feed_forward_in_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.feed_forward = feed_forward
        self.feed_forward_out_norm = out_norm()

    def forward(
        self,
        x_BSD: torch.Tensor,
        mask_BS: torch.Tensor,
        visibility: Visibility,
        memory: RouteMemory | None = None,
    ) -> tuple[torch.Tensor, Routing | None]:
        """Return the block's output and, for a routed block, its routing.

        Args:
            x_BSD: Hidden states.
            mask_BS: Bool, `True` for real tokens.
            visibility: Which positions attention mixes.
            memory: Of this call, which may be made twice: see `RouteMemory`.
        """
        attended = self.attention(self.attention_in_norm(x_BSD), visibility)
        h_BSD = x_BSD + self.attention_out_norm(attended)
        normed = self.feed_forward_in_norm(h_BSD)
        routing = None
        if isinstance(self.feed_forward, MoE):
            y_TD, routing = self.feed_forward(normed.flatten(0, 1), mask_BS.flatten(), memory)
            out = y_TD.view_as(normed)
        else:
            out = self.feed_forward(normed)
        return h_BSD + self.feed_forward_out_norm(out), routing
