"""A decoder-only transformer, or the part of one that a pipeline stage holds.

Parameter names are global (`layers.7.attention.query.weight`) whatever part this is, so that a
checkpoint and an initialisation know a tensor by its name alone.
"""

from collections.abc import Callable, Collection

import torch
from olmo_routing import Routing, SelectionBias
from torch import nn
from torch.utils.checkpoint import checkpoint

from olmo_trainer.config import ModelConfig
from olmo_trainer.model.block import Block
from olmo_trainer.model.moe import MoE, RouteMemory
from olmo_trainer.model.regions import EAGER, Regions
from olmo_trainer.model.visibility import Visibility


class Transformer(nn.Module):
    """Layers `layers` of the model; the first part embeds tokens, the last one makes logits.

    Of the blocks `recomputed`, by global index, only the input is kept for the backward.
    Its S positions are those of `num_context * S` that this context rank holds.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        make_block: Callable[[int], Block],
        *,
        recomputed: Collection[int] = (),
        num_context: int = 1,
        regions: Regions = EAGER,
    ) -> None:
        super().__init__()
        self.regions = regions
        self.recomputed = frozenset(recomputed)
        self.num_context = num_context
        self.is_first = layers.start == 0
        self.is_last = layers.stop == config.num_layers
        if self.is_first:
            self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleDict({str(index): make_block(index) for index in layers})
        if self.is_last:
            self.final_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    @property
    def selection_biases(self) -> dict[int, SelectionBias]:
        """The selection bias of each routed layer held here, by global layer index."""
        return {
            int(index): bias
            for index, block in self.layers.items()
            if isinstance(block, Block)
            and isinstance(layer := block.feed_forward, MoE)
            and (bias := layer.router.selection_bias) is not None
        }

    def forward(
        self, x: torch.Tensor, mask_BS: torch.Tensor, documents_BS: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[int, Routing]]:
        """Run this part.

        Args:
            x: Tokens (B, S) int64 for the first part, hidden states (B, S, D) for a later one.
            mask_BS: Bool, `True` for real tokens.
            documents_BS: Integers, equal within a document and each document one run: no position
                attends into another one. `None`: a sequence is one document. Of whole sequences,
                (B, num_context * S).

        Returns:
            Hidden states (B, S, D), or logits (B, S, V) from the last part; and the routing of
            each routed layer by its global index.
        """
        hidden = self.embedding(x) if self.is_first else x
        num_positions = self.num_context * mask_BS.shape[1]
        visibility = Visibility(num_positions, mask_BS.device, documents_BS)
        routings: dict[int, Routing] = {}
        for index, block in self.layers.items():
            hidden, routing = self._run(int(index), block, hidden, mask_BS, visibility)
            if routing is not None:
                routings[int(index)] = routing
        if self.is_last:
            hidden = self.regions.logits(self.final_norm, self.head, hidden)
        return hidden, routings

    def _run(
        self,
        index: int,
        block: nn.Module,
        hidden: torch.Tensor,
        mask_BS: torch.Tensor,
        visibility: Visibility,
    ) -> tuple[torch.Tensor, Routing | None]:
        if index not in self.recomputed or not torch.is_grad_enabled():
            return block(hidden, mask_BS, visibility)
        # Not reentrant: the routing's losses have gradients of their own, and with a split backward
        # autograd hands the executor's mode on to the second forward.
        result = checkpoint(
            block,
            *(hidden, mask_BS, visibility, RouteMemory()),
            use_reentrant=False,
            preserve_rng_state=False,  # nothing is drawn
        )
        assert result is not None, "a block returns its output"
        return result
