"""Attention over sequences that are cut: positions for heads, and back (context parallelism).

Of R context ranks, rank r holds positions [r S/R, (r+1) S/R) of every sequence, for everything
that looks at one position at a time. Attention looks at all of them, but at one head at a time: so
an all-to-all gives each rank every position of A/R heads before it, and a second one gives back
every head of the rank's own positions after it (DeepSpeed Ulysses, Jacobs et al., arXiv 2309.14509,
section 3). A rank sends a tensor's (R-1)/R each time, whatever R and S are.

Each of fewer key/value heads than ranks is sent to several ranks, those that hold its queries.

Shapes: B sequences, S positions, A query heads, G key/value heads, C channels a head, R ranks.
"""

from typing import Any

import torch
import torch.distributed as dist


class ContextExchange:
    """The exchanges of one context group; every rank calls them alike.

    R divides A, and one of R and G the other: `TrainerConfig` says so of a run that does not.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = dist.get_world_size(group)

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return this rank's heads at all positions, from all heads at its positions.

        Args:
            query: (B, A, S/R, C).
            key: (B, G, S/R, C) of the same dtype; so is `value`.
            value: As `key`.

        Returns:
            Query (B, A/R, S, C), and key and value (B, max(G/R, 1), S, C), in one exchange.
        """
        copies = max(self.num_ranks // key.shape[1], 1)
        if copies > 1:
            key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
        parts = [each.unflatten(1, (self.num_ranks, -1)) for each in (query, key, value)]
        sent_RBHSC = torch.cat(parts, dim=2).transpose(0, 1)
        whole_BHRSC = self._exchange(sent_RBHSC).permute(1, 2, 0, 3, 4)
        return whole_BHRSC.flatten(2, 3).split([each.shape[2] for each in parts], dim=1)

    def to_positions(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return all heads at this rank's positions: (B, A/R, S, C) to (B, A, S/R, C)."""
        sent_RBASC = mixed.unflatten(2, (self.num_ranks, -1)).permute(2, 0, 1, 3, 4)
        return self._exchange(sent_RBASC).transpose(0, 1).flatten(1, 2)

    def _exchange(self, sent: torch.Tensor) -> torch.Tensor:
        exchanged = _AllToAll.apply(sent, self.group)
        assert isinstance(exchanged, torch.Tensor), "an exchange returns what arrived"
        return exchanged


class _AllToAll(torch.autograd.Function):
    """Part r of the first dimension goes to rank r; gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        arrived = sent.new_empty(sent.shape)
        dist.all_to_all_single(arrived, sent.contiguous(), group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, arrived: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sent = arrived.new_empty(arrived.shape)
        dist.all_to_all_single(sent, arrived.contiguous(), group=ctx.group)
        return sent, None
