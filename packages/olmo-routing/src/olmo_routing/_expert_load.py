"""Balance from sums over tokens: what is left to measure after counts were added over ranks.

With f the fractions of routes, P the mean normalised scores and u = 1 / E, the balance loss is

    L = E * f.P = 1 + E * (f - u).(P - u):

a signed cross-term, not a distance. It falls below 1 when the experts with many routes get little
probability, however uneven the routes are, and a router can be trained into that corner: mass moves
to cold experts that still never win. We call this token gerrymandering, and measure it by

    honesty = cov(f, P) / var(f),

the slope of P on f over the experts: 1 when P follows the load, 0 when the loss is blind to it,
negative when the loss rewards imbalance. Shapes: E experts.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# The loss of float32 sums over tokens is exact to about this; closer to 1 is no evidence.
_ROUNDING = 1e-5


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadReport:
    """The balance of one layer, as 0-d tensors on the device of the counts.

    Attributes:
        imbalance: the largest expert's routes over the mean; 1 = balanced, at most E.
        entropy_deficit: 1 - H(f) / log E; 0 = balanced, 1 = one expert has all.
        coefficient_of_variation: standard deviation over mean of the routes; 0 = balanced.
        dead_experts: int64, experts without a route.
        balance_loss: E * f.P; 1 = balanced.
        cross_term: E * (f - u).(P - u); the loss is 1 plus this when f and P each sum to 1.
        honesty: cov(f, P) / var(f); 1 when all f are equal.
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
    gerrymandered: Tensor


@torch.no_grad()
def measure_load(counts_E: Tensor, mass_E: Tensor) -> LoadReport:
    """Measure the balance of a layer from its sums over tokens, ranks and microbatches.

    Args:
        counts_E: routes requested of each expert, integer or float, not negative.
        mass_E: normalised scores of each expert, summed over the same tokens; float, any scale.

    Returns:
        The `LoadReport`, float64, with f = counts over the routes that exist (`measure_balance`
        divides by K T, so routes of -1 lower its loss). Nothing is read back from the device.

    Raises:
        ValueError: the two are not vectors of one length.
    """
    if counts_E.ndim != 1 or counts_E.shape != mass_E.shape or not len(counts_E):
        raise ValueError(
            "`counts_E` and `mass_E` must be vectors of one length, "
            f"got {tuple(counts_E.shape)} and {tuple(mass_E.shape)}."
        )
    counts_E, mass_E = counts_E.double(), mass_E.double()
    return load_report(counts_E, mass_E / mass_E.sum().clamp(min=1e-30), counts_E.sum())


def load_report(counts_E: Tensor, mean_scores_E: Tensor, routes: Tensor) -> LoadReport:
    """Return the report for f = counts / `routes` and P = `mean_scores_E`, in the dtype of P."""
    num_experts, dtype = len(counts_E), mean_scores_E.dtype
    total = counts_E.sum()
    some, slots = total.clamp(min=1), routes.clamp(min=1)
    # E * counts - total is an exact integer: equal loads deviate by exactly 0.
    excess_E = (num_experts * counts_E - total).to(dtype) / num_experts
    deviation_E = excess_E / slots
    covariance = (deviation_E * (mean_scores_E - mean_scores_E.mean())).sum()
    variance = deviation_E.square().sum()
    even = variance == 0
    entropy = torch.special.entr(counts_E.to(dtype) / some).sum()
    deficit = 1 - entropy / math.log(num_experts) if num_experts > 1 else torch.zeros_like(entropy)
    imbalance = torch.where(total > 0, counts_E.max().to(dtype) * num_experts / some, 1.0)
    loss = num_experts * (counts_E.to(dtype) / slots * mean_scores_E).sum()
    return LoadReport(
        imbalance=imbalance,
        entropy_deficit=torch.where(total > 0, deficit, 0.0),
        coefficient_of_variation=excess_E.square().mean().sqrt() * num_experts / some,
        dead_experts=(counts_E == 0).sum(),
        balance_loss=loss,
        cross_term=num_experts * covariance,
        honesty=torch.where(even, 1.0, covariance / torch.where(even, 1.0, variance)),
        gerrymandered=(loss < 1 - _ROUNDING) & (imbalance > 1 + _ROUNDING),
    )
