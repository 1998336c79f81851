"""A pipeline stage as the executor calls it: hidden states in, hidden states or the loss out.

Loss and auxiliary losses are *shares*: each microbatch divides by the tokens of the whole global
batch, so a plain sum over microbatches, data ranks and stages is the step's mean. No layout,
accumulation or padding changes what a coefficient means.

    loss      = sum of cross entropies / loss tokens of the global batch
    auxiliary = sum over routed layers of (c_b L_b + c_z L_z) * real tokens here / in all
                + c_h * sum of logsumexp(logits)^2 / loss tokens of the global batch

The last term is the head's z-loss (Chowdhery et al., PaLM, arXiv 2204.02311, section 5), a mean
over the tokens that have a target, as the cross entropy is.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from olmo_routing import Routing, balance_loss, route_fractions, router_z_loss
from torch import nn

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
    """A part of the model with its share of the losses.

    `context_group` holds the other parts of the sequences: balance is measured over all of them.
    """

    def __init__(
        self,
        part: Transformer,
        moe: MoEConfig,
        statistics: StepStatistics,
        *,
        head_z_loss: float = 0.0,
        context_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.context_group = context_group
        self.part = part
        self.moe = moe
        self.head_z_loss = head_z_loss
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
        counts = torch.is_grad_enabled()
        terms = self._routers(routings, microbatch) if counts else []
        if self.part.is_last:
            total, squares = self.part.regions.token_sums(
                output, batch.targets_BS, counts and self.head_z_loss > 0
            )
            output = total / microbatch.loss_tokens * microbatch.loss_scale
            if counts:
                self.statistics.add_loss(output, (batch.targets_BS >= 0).sum())
            if squares is not None:
                z = squares / microbatch.loss_tokens
                self.statistics.add_head_z_loss(z)
                terms.append(self.head_z_loss * z)
        if not terms:
            return output, None
        auxiliary = torch.stack(terms).sum()
        self.statistics.add_auxiliary(auxiliary)
        return output, auxiliary

    def _routers(self, routings: dict[int, Routing], microbatch: Microbatch) -> list[torch.Tensor]:
        mask_BS = microbatch.batch.mask_BS
        mask_T, share = mask_BS.flatten(), mask_BS.sum() / microbatch.real_tokens
        sequences = len(mask_BS) if self.moe.balance_scope == "sequence" else 1
        terms: list[torch.Tensor] = []
        for layer, routing in routings.items():
            fractions_BE = None
            if self.context_group is not None:
                fractions_BE = route_fractions(
                    routing.expert_ids_TK,
                    self.moe.num_experts,
                    mask_T=mask_T,
                    num_sequences=sequences,
                    group=self.context_group,
                )
            balance = share * balance_loss(
                routing.scores_TE,
                routing.expert_ids_TK,
                mask_T=mask_T,
                num_sequences=sequences,
                fractions_BE=fractions_BE,
            )
            z = share * router_z_loss(routing.logits_TE, mask_T=mask_T)
            self.statistics.add_routing(layer, routing, mask_T, balance, z, share)
            terms.append(self.moe.balance_loss * balance + self.moe.z_loss * z)
        return terms
