"""A block: RMSNorm before each sublayer, in the report's peri-norm after it too; residual around.

`h = x + norm(attention(norm(x)))`, `y = h + norm(ffn(norm(h)))` (report, section 14-D); OLMoE and
Qwen3-MoE are `pre`: without the outer norms.
"""

from typing import Literal

import torch
from olmo_routing import Routing
from torch import nn

from olmo_trainer.model.attention import Attention
from olmo_trainer.model.moe import MoE, RouteMemory
from olmo_trainer.model.regions import EAGER, Regions
from olmo_trainer.model.visibility import Visibility


class Block(nn.Module):
    """One layer of the model; x (B, S, D) to (B, S, D).

    `regions` are its dense stretches, as they stand or compiled.
    """

    def __init__(
        self,
        d_model: int,
        norm_eps: float,
        attention: Attention,
        feed_forward: nn.Module,
        *,
        norms: Literal["peri", "pre"] = "peri",
        regions: Regions = EAGER,
    ) -> None:
        super().__init__()
        self.regions = regions

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
        do = self.regions
        heads = do.enter_attention(self.attention_in_norm, self.attention, x_BSD)
        mixed = self.attention.mix(*heads, visibility, turn=do.turn)
        h_BSD, normed = do.leave_attention(
            *(self.attention, self.attention_out_norm, self.feed_forward_in_norm, x_BSD, mixed)
        )
        out_norm = self.feed_forward_out_norm
        if not isinstance(self.feed_forward, MoE):
            return do.dense_feed_forward(self.feed_forward, out_norm, h_BSD, normed), None
        y_TD, routing = self.feed_forward(normed.flatten(0, 1), mask_BS.flatten(), memory)
        return do.join(out_norm, h_BSD, y_TD.view_as(normed)), routing
