"""A routed layer: router -> dispatcher -> experts -> dispatcher, plus one shared expert.

`y_t = sum_k K p_k f_k(x_t) + s(x_t)`, with `p` renormalised over the K selected experts: the
report's merge rule (equation 83). The layer knows no ranks: its dispatcher brings the rows of the
experts that live here, wherever their tokens are.
"""

import torch
from olmo_ep_comm import Dispatcher
from olmo_experts_gemm import Experts
from olmo_mxfp8 import MXExperts
from olmo_routing import Router, Routing
from torch import nn


class MoE(nn.Module):
    """Router, experts held here, and the shared expert; x (T, D) to (T, D)."""

    def __init__(
        self,
        router: Router,
        dispatcher: Dispatcher,
        experts: Experts | MXExperts,
        shared: nn.Module | None,
    ) -> None:
        super().__init__()
        self.router = router
        self.dispatcher = dispatcher
        self.experts = experts
        self.shared = shared

    def forward(self, x_TD: torch.Tensor, mask_T: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """Return the layer's output and what the router decided.

        Args:
            x_TD: Tokens.
            mask_T: Bool, `True` for real tokens; padding is routed nowhere.
        """
        routing = self.router(x_TD, mask_T=mask_T)
        sent = self.dispatcher.dispatch(x_TD, routing.expert_ids_TK, routing.weights_TK)
        rows_RD = self.experts(
            sent.rows_RD, sent.offsets_E, row_weights_R=sent.row_weights_R.to(x_TD.dtype)
        )
        y_TD = self.dispatcher.combine(rows_RD, sent.handle)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD, routing
