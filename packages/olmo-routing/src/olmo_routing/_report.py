"""How balanced is the routing, and does the balance loss tell the truth about it?

With f the fractions of routes, P the mean normalised scores and u = 1 / E, the balance loss is

    L = E * f.P = 1 + E * (f - u).(P - u):

a signed cross-term, not a distance. It falls below 1 when the experts with many routes get little
probability, however uneven the routes are, and a router can be trained into that corner: mass moves
to cold experts that still never win. We call this token gerrymandering, and measure it by

    honesty = cov(f, P) / var(f),

the slope of P on f over the experts: 1 when P follows the load, 0 when the loss is blind to it,
negative when the loss rewards imbalance. Shapes: T tokens, K experts a token, E experts.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import reference
from ._checks import check_mask, check_routed_tokens

# The loss of T float32 tokens is exact to about this; closer to 1 is no evidence.
_ROUNDING = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class BalanceReport:
    """The balance of one layer over one batch, as 0-d tensors on the device of the scores.

    Attributes:
        imbalance: the largest expert's routes over the mean; 1 = balanced, at most E.
        entropy_deficit: 1 - H(f) / log E; 0 = balanced, 1 = one expert has all.
        coefficient_of_variation: standard deviation over mean of the routes; 0 = balanced.
        dead_experts: int64, experts without a route.
        balance_loss: what `balance_loss` returns.
        cross_term: E * (f - u).(P - u); the loss is 1 plus this when every real token has K routes
            and a positive score.
        honesty: cov(f, P) / var(f); 1 when all f are equal.
        topk_margin: mean over tokens of the K-th minus the next largest score; 0 when K = E.
        gerrymandered: bool, the loss is below 1 though the routes are uneven.

    Without any route: imbalance 1, honesty 1, all `dead_experts`, not gerrymandered, the rest 0.
    """

    imbalance: Tensor
    entropy_deficit: Tensor
    coefficient_of_variation: Tensor
    dead_experts: Tensor
    balance_loss: Tensor
    cross_term: Tensor
    honesty: Tensor
    topk_margin: Tensor
    gerrymandered: Tensor


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
    dtype, num_experts, top_k = scores_TE.dtype, scores_TE.shape[1], expert_ids_TK.shape[1]
    counts_BE, mass_BE, tokens_B = reference.load_and_mass(scores_TE, expert_ids_TK, mask_T, 1)
    counts_E, mass_E = counts_BE[0], mass_BE[0]
    total = counts_E.sum()
    some = total.clamp(min=1)

    # E * counts - total is an exact integer: equal loads deviate by exactly 0.
    excess_E = (num_experts * counts_E - total).to(dtype) / num_experts
    deviation_E = excess_E / (top_k * tokens_B[0]).clamp(min=1)
    covariance = (deviation_E * (mass_E - mass_E.mean())).sum()
    variance = deviation_E.square().sum()
    even = variance == 0
    entropy = torch.special.entr(counts_E.to(dtype) / some).sum()
    deficit = 1 - entropy / math.log(num_experts) if num_experts > 1 else torch.zeros_like(entropy)
    imbalance = torch.where(total > 0, counts_E.max().to(dtype) * num_experts / some, 1.0)
    loss = reference.balance_loss(scores_TE, expert_ids_TK, mask_T, 1)
    return BalanceReport(
        imbalance=imbalance,
        entropy_deficit=torch.where(total > 0, deficit, 0.0),
        coefficient_of_variation=excess_E.square().mean().sqrt() * num_experts / some,
        dead_experts=(counts_E == 0).sum(),
        balance_loss=loss,
        cross_term=num_experts * covariance,
        honesty=torch.where(even, 1.0, covariance / torch.where(even, 1.0, variance)),
        topk_margin=_topk_margin(scores_TE, top_k, mask_T),
        gerrymandered=(loss < 1 - _ROUNDING) & (imbalance > 1 + _ROUNDING),
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
