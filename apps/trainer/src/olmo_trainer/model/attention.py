"""Causal grouped-query attention: q/k RMSNorm, rotary positions, full or sliding.

Where sequences are cut over context ranks, x is this rank's positions; the exchange gives attention
all of them for some heads, so that rotary positions, windows and documents are those of a whole.

Shapes: B sequences, S positions, D width, A query heads, G key/value heads, C channels a head.
Rotary embedding after Su et al., arXiv 2104.09864, in the half-split form.
"""

from collections.abc import Callable

import torch
from torch import nn

from olmo_trainer.config import AttentionConfig
from olmo_trainer.model.context_exchange import ContextExchange
from olmo_trainer.model.visibility import Visibility

Turn = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


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


def turn(
    query_BASC: torch.Tensor, key_BGSC: torch.Tensor, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn queries and keys by their positions, which begin at 0."""
    _, _, num_positions, head_dim = query_BASC.shape
    cos, sin = rotary_tables(num_positions, head_dim, theta, query_BASC.device)
    return rotate(query_BASC, cos, sin), rotate(key_BGSC, cos, sin)


class Attention(nn.Module):
    """Self-attention of one block; x (B, S, D) to (B, S, D)."""

    def __init__(
        self,
        d_model: int,
        config: AttentionConfig,
        norm_eps: float,
        *,
        window: int = 0,
        exchange: ContextExchange | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rope_theta = config.rope_theta
        self.exchange = exchange
        self.window = window
        query, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.query = nn.Linear(d_model, query, bias=False)
        self.key = nn.Linear(d_model, keys, bias=False)
        self.value = nn.Linear(d_model, keys, bias=False)
        self.out = nn.Linear(query, d_model, bias=False)
        self.per_head = per_head = config.qk_norm == "head"
        self.query_norm = nn.RMSNorm(config.head_dim if per_head else query, eps=norm_eps)
        self.key_norm = nn.RMSNorm(config.head_dim if per_head else keys, eps=norm_eps)

    def forward(self, x_BSD: torch.Tensor, visibility: Visibility) -> torch.Tensor:
        """Attend each position to those it sees."""
        return self.leave(self.mix(*self.enter(x_BSD), visibility))

    def enter(self, x_BSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query (B, A, S, C), key and value (B, G, S, C) of these positions.

        Turned, unless they are a part of their sequences: these are turned where all are together.
        """
        query = self._normed_heads(self.query(x_BSD), self.query_norm)
        key = self._normed_heads(self.key(x_BSD), self.key_norm)
        value = self._heads(self.value(x_BSD))
        if self.exchange is None:
            query, key = turn(query, key, self.rope_theta)
        return query, key, value

    def mix(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        visibility: Visibility,
        turn: Turn = turn,
    ) -> torch.Tensor:
        """Return what each of these positions sees, (B, A, S, C), from what `enter` gave."""
        if self.exchange is None:
            return visibility.attend(query, key, value, window=self.window)
        query, key, value = self.exchange.to_heads(query, key, value)
        query, key = turn(query, key, self.rope_theta)
        mixed = visibility.attend(query, key, value, window=self.window)
        return self.exchange.to_positions(mixed)

    def leave(self, mixed_BASC: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D) of the mixed heads."""
        return self.out(mixed_BASC.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _normed_heads(self, x: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
        if not self.per_head:
            return self._heads(norm(x))
        return norm(x.unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
