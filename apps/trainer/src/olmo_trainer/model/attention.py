"""Causal grouped-query attention: per-head q/k RMSNorm, rotary positions, torch's SDPA.

Shapes: B sequences, S positions, D width, A query heads, G key/value heads, C channels a head.
Rotary embedding after Su et al., arXiv 2104.09864, in the half-split form.
"""

import torch
from torch import nn
from torch.nn import functional as F

from olmo_trainer.config import AttentionConfig


def rotary_tables(
    num_positions: int, head_dim: int, theta: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of `position * theta ** (-2i / C)`, each (S, C/2) float32."""
    channels = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    positions = torch.arange(num_positions, device=device, dtype=torch.float32)
    angles = positions[:, None] * theta ** (-channels / head_dim)
    return angles.cos(), angles.sin()


def rotate(x_BASC: torch.Tensor, cos_SC: torch.Tensor, sin_SC: torch.Tensor) -> torch.Tensor:
    """Turn each pair of channels (c, c + C/2) by its position's angle; in float32, dtype kept."""
    first, second = x_BASC.float().chunk(2, dim=-1)
    turned = (first * cos_SC - second * sin_SC, second * cos_SC + first * sin_SC)
    return torch.cat(turned, dim=-1).to(x_BASC.dtype)


class Attention(nn.Module):
    """Self-attention of one block; x (B, S, D) to (B, S, D)."""

    def __init__(self, d_model: int, config: AttentionConfig, norm_eps: float) -> None:
        super().__init__()
        self.config = config
        query, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.query = nn.Linear(d_model, query, bias=False)
        self.key = nn.Linear(d_model, keys, bias=False)
        self.value = nn.Linear(d_model, keys, bias=False)
        self.out = nn.Linear(query, d_model, bias=False)
        self.query_norm = nn.RMSNorm(config.head_dim, eps=norm_eps)
        self.key_norm = nn.RMSNorm(config.head_dim, eps=norm_eps)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Attend each position to itself and those before it."""
        B, S, _ = x_BSD.shape
        heads, groups, C = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        query = self.query_norm(self.query(x_BSD).view(B, S, heads, C)).transpose(1, 2)
        key = self.key_norm(self.key(x_BSD).view(B, S, groups, C)).transpose(1, 2)
        value = self.value(x_BSD).view(B, S, groups, C).transpose(1, 2)
        cos, sin = rotary_tables(S, C, self.config.rope_theta, x_BSD.device)
        mixed = F.scaled_dot_product_attention(
            rotate(query, cos, sin),
            rotate(key, cos, sin),
            value,
            is_causal=True,
            enable_gqa=heads != groups,
        )
        return self.out(mixed.transpose(1, 2).reshape(B, S, heads * C))
