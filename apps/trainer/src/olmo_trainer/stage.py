"""A pipeline stage as the executor calls it: hidden states in, hidden states or the loss out.

Loss and auxiliary losses are *shares*: each microbatch divides by the tokens of the whole global
batch, so a plain sum over microbatches, data ranks and stages is the step's mean. No layout,
accumulation or padding changes what a coefficient means.

    loss      = sum of cross entropies / loss tokens of the global batch
    auxiliary = sum over routed layers of (c_b L_b + c_z L_z) * real tokens here / in all
"""

from dataclasses import dataclass

import torch
from olmo_routing import Routing, balance_loss, router_z_loss
from torch import nn
from torch.nn import functional as F

from olmo_trainer.config import MoEConfig
from olmo_trainer.data import Batch
from olmo_trainer.model.transformer import Transformer
from olmo_trainer.statistics import StepStatistics


@dataclass(frozen=True)
class Microbatch:
    """One microbatch and the global batch's token counts that its losses are divided by."""

    batch: Batch
    loss_tokens: torch.Tensor  # 0-d float32: targets of the global batch
    real_tokens: torch.Tensor  # 0-d float32: tokens of the global batch that are not padding
    loss_scale: float = 1.0  # 0 leaves the auxiliary losses alone


class Stage(nn.Module):
    """A part of the model with its share of the losses."""

    def __init__(self, part: Transformer, moe: MoEConfig, statistics: StepStatistics) -> None:
        super().__init__()
        self.part = part
        self.moe = moe
        self.statistics = statistics

    def forward(
        self, hidden: torch.Tensor | None, microbatch: Microbatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (hidden states or loss share, auxiliary share or `None`).

        Counts the step's statistics when gradients are on: an evaluation leaves them alone.
        """
        batch = microbatch.batch
        x = batch.tokens_BS if hidden is None else hidden
        output, routings = self.part(x, batch.mask_BS, batch.documents_BS)
        auxiliary = self._auxiliary(routings, microbatch) if torch.is_grad_enabled() else None
        if self.part.is_last:
            total = F.cross_entropy(
                output.float().flatten(0, 1), batch.targets_BS.flatten(), reduction="sum"
            )
            output = total / microbatch.loss_tokens * microbatch.loss_scale
            if torch.is_grad_enabled():
                self.statistics.add_loss(output, (batch.targets_BS >= 0).sum())
        return output, auxiliary

    def _auxiliary(
        self, routings: dict[int, Routing], microbatch: Microbatch
    ) -> torch.Tensor | None:
        if not routings:
            return None
        mask_BS = microbatch.batch.mask_BS
        mask_T, share = mask_BS.flatten(), mask_BS.sum() / microbatch.real_tokens
        sequences = len(mask_BS) if self.moe.balance_scope == "sequence" else 1
        terms = []
        for layer, routing in routings.items():
            balance = share * balance_loss(
                routing.scores_TE, routing.expert_ids_TK, mask_T=mask_T, num_sequences=sequences
            )
            z = share * router_z_loss(routing.logits_TE, mask_T=mask_T)
            self.statistics.add_routing(layer, routing, mask_T, balance, z, share)
            terms.append(self.moe.balance_loss * balance + self.moe.z_loss * z)
        auxiliary = torch.stack(terms).sum()
        self.statistics.add_auxiliary(auxiliary)
        return auxiliary
