"""A routed layer: router -> dispatcher -> experts -> dispatcher, plus one shared expert.

`y_t = sum_k K p_k f_k(x_t) + s(x_t)`, with `p` renormalised over the K selected experts: the
report's merge rule (equation 83). The layer knows no ranks: its dispatcher brings the rows of the
experts that live here, wherever their tokens are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from olmo_ep_comm import Dispatched, Dispatcher
from olmo_experts_gemm import Experts, SavedActivationPacker
from olmo_mxfp8 import MXExperts
from olmo_routing import Router, Routing
from torch import nn
from torch.utils.checkpoint import checkpoint

from olmo_trainer.model.regions import EAGER, Regions


@dataclass
class RouteMemory:
    """Where the first forward of a layer leaves its choice for a recomputed one.

    Rounding may differ between the two and flip a near tie; the rows of a recomputed forward would
    then be others than those of the gradients.
    """

    expert_ids_TK: torch.Tensor | None = None


class MoE(nn.Module):
    """Router, experts held here, and the shared expert; x (T, D) to (T, D).

    Args:
        router: Of this layer.
        dispatcher: Brings rows to the experts, and results back.
        experts: Those held here.
        shared: The shared expert, or `None`.
        pack: Keeps the activations of `Experts` in another form; `None` = as they are.
        recompute_experts: Keep the experts' rows and compute what is inside them again.
        count_dispatched: Called with what was dispatched, in each forward with gradients that is
            not a recomputed one.
        regions: How the shared expert is called.
    """

    def __init__(
        self,
        router: Router,
        dispatcher: Dispatcher,
        experts: Experts | MXExperts,
        shared: nn.Module | None,
        *,
        pack: SavedActivationPacker | None = None,
        recompute_experts: bool = False,
        count_dispatched: Callable[[Dispatched], None] | None = None,
        regions: Regions = EAGER,
    ) -> None:
        super().__init__()
        self.regions = regions
        self.router = router
        self.dispatcher = dispatcher
        self.experts = experts
        self.shared = shared
        self.pack = pack
        self.recompute_experts = recompute_experts
        self.count_dispatched = count_dispatched

    def forward(
        self, x_TD: torch.Tensor, mask_T: torch.Tensor, memory: RouteMemory | None = None
    ) -> tuple[torch.Tensor, Routing]:
        """Return the layer's output and what the router decided.

        Args:
            x_TD: Tokens.
            mask_T: Bool, `True` for real tokens; padding is routed nowhere.
            memory: Of this call, which may be made twice: the second takes the routes of the first.
        """
        chosen = None if memory is None else memory.expert_ids_TK
        routing = self.router(x_TD, mask_T=mask_T, expert_ids_TK=chosen)
        if memory is not None:
            memory.expert_ids_TK = routing.expert_ids_TK
        sent = self.dispatcher.dispatch(x_TD, routing.expert_ids_TK, routing.weights_TK)
        if self.count_dispatched is not None and torch.is_grad_enabled() and chosen is None:
            self.count_dispatched(sent)
        row_weights_R = sent.row_weights_R.to(x_TD.dtype)
        if self.recompute_experts and torch.is_grad_enabled():
            rows_RD = checkpoint(
                self._run_experts,
                *(sent.rows_RD, sent.offsets_E, row_weights_R),
                use_reentrant=False,
                preserve_rng_state=False,  # nothing is drawn
            )
            assert isinstance(rows_RD, torch.Tensor), "what the experts return"
        else:
            rows_RD = self._run_experts(sent.rows_RD, sent.offsets_E, row_weights_R)
        y_TD = self.dispatcher.combine(rows_RD, sent.handle)
        if self.shared is not None:
            y_TD = self.regions.add_shared(self.shared, x_TD, y_TD)
        return y_TD, routing

    def _run_experts(
        self, rows_RD: torch.Tensor, offsets_E: torch.Tensor, row_weights_R: torch.Tensor
    ) -> torch.Tensor:
        if isinstance(self.experts, MXExperts):
            return self.experts(rows_RD, offsets_E, row_weights_R=row_weights_R)
        return self.experts(rows_RD, offsets_E, row_weights_R=row_weights_R, pack=self.pack)
