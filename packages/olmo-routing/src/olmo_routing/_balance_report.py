"""How balanced is the routing of a batch, and does the balance loss tell the truth about it?

What counts and probabilities say is in `_expert_load.py`; the scores themselves add how close the
selection was. Shapes: T tokens, K experts a token, E experts.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from . import reference
from ._checks import check_mask, check_routed_tokens
from ._expert_load import LoadReport, load_report


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BalanceReport(LoadReport):
    """The balance of one layer over one batch, as 0-d tensors on the device of the scores.

    Attributes:
        topk_margin: mean over tokens of the K-th minus the next largest score; 0 when K = E.
    """

    topk_margin: Tensor


@torch.no_grad()
def measure_balance(
    scores_TE: Tensor, expert_ids_TK: Tensor, *, mask_T: Tensor | None = None
) -> BalanceReport:
    """Measure the balance of one layer's routing.

    Args:
        scores_TE: not negative, of any gate, without bias.
        expert_ids_TK: int64 in [-1, E), the requested routes.
        mask_T: bool, False = padding, which counts nowhere.

    Returns:
        The `BalanceReport`, float32 (float64 for float64 scores), without gradients. Nothing is
        read back from the device.

    Raises:
        TypeError: a dtype is not as above.
        ValueError: a shape, range or device is not as above.
    """
    check_routed_tokens("scores_TE", scores_TE, expert_ids_TK)
    check_mask(mask_T, scores_TE)
    scores_TE = scores_TE.to(torch.promote_types(scores_TE.dtype, torch.float32))
    top_k = expert_ids_TK.shape[1]
    counts_BE, mass_BE, tokens_B = reference.load_and_mass(scores_TE, expert_ids_TK, mask_T, 1)
    load = load_report(counts_BE[0], mass_BE[0], top_k * tokens_B[0])
    return BalanceReport(
        **{entry.name: getattr(load, entry.name) for entry in fields(load)},
        topk_margin=_topk_margin(scores_TE, top_k, mask_T),
    )


def _topk_margin(scores_TE: Tensor, top_k: int, mask_T: Tensor | None) -> Tensor:
    """Return the mean distance between the K-th and the next score over real tokens."""
    num_tokens, num_experts = scores_TE.shape
    if top_k == num_experts:
        return scores_TE.new_zeros(())
    best_TK = scores_TE.topk(top_k + 1, dim=1).values
    margin_T = best_TK[:, -2] - best_TK[:, -1]
    if mask_T is None:
        return margin_T.sum() / max(num_tokens, 1)
    return torch.where(mask_T, margin_T, 0.0).sum() / mask_T.sum().clamp(min=1)
