"""Balance from sums over tokens: what is left to measure after counts were added over ranks.

With f the fractions of routes, P the mean normalised scores and u = 1 / E, the balance loss is

    L = E * f.P = 1 + E * (f - u).(P - u):

a signed cross-term, not a distance. It falls below 1 when the experts with many routes get little
probability, however uneven the routes are, and a router can be trained into that corner: mass moves
to cold experts that still never win. We call this token gerrymandering, and measure it by

    honesty = cov(f, P) / var(f),

the slope of P on f over the experts: 1 when P follows the load, 0 when the loss is blind to it,
negative when the loss rewards imbalance.

Requested and kept routes, experts and ranks are measured apart: drops can hide a bad request behind
even kept counts, and even experts can lie on uneven ranks. Shapes: E experts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ._checks import can_read, check_positive, check_same_device, check_tensor
from ._pytree import tensor_tree

# The loss of float32 sums over tokens is exact to about this; closer to 1 is no evidence.
ROUNDING = 1e-5


@tensor_tree
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadReport:
    """The balance of one layer, as 0-d tensors on the device of the counts.

    Attributes:
        routes: how many routes were requested.
        imbalance: the largest expert's requested routes over the mean; 1 = balanced, at most E.
        rank_imbalance: the same of the ranks' sums over their experts; 1 with one rank.
        kept_imbalance: that of the experts' kept routes; of the requested when no kept were given.
        kept_rank_imbalance: that of the ranks' kept routes.
        dropped_routes: fraction of the requested routes that were not kept; 0 when none were given.
        entropy_deficit: 1 - H(f) / log E; 0 = balanced, 1 = one expert has all.
        coefficient_of_variation: standard deviation over mean of the routes; 0 = balanced.
        score_variation: the same of P. The cross-term is at most the product of the two.
        dead_experts: int64, experts without a requested route.
        dead_mass: the part of P on these experts.
        balance_loss: E * f.P; 1 = balanced.
        cross_term: E * (f - u).(P - u); the loss is 1 plus this when f and P each sum to 1.
        honesty: cov(f, P) / var(f); 1 when all f are equal.
        gerrymandered: bool, the loss is below 1 though the routes are uneven: a fact of these
            tokens. Few tokens come to it by chance; `GerrymanderAlarm` knows by how much.

    Without any route: imbalances 1, honesty 1, all `dead_experts`, not gerrymandered, drops 0; also
    0 the rest that counts alone determine.
    """

    routes: Tensor
    imbalance: Tensor
    rank_imbalance: Tensor
    kept_imbalance: Tensor
    kept_rank_imbalance: Tensor
    dropped_routes: Tensor
    entropy_deficit: Tensor
    coefficient_of_variation: Tensor
    score_variation: Tensor
    dead_experts: Tensor
    dead_mass: Tensor
    balance_loss: Tensor
    cross_term: Tensor
    honesty: Tensor
    gerrymandered: Tensor

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the fields, in the order of the columns of `stack_reports`."""
        return tuple(field.name for field in fields(cls))


def stack_reports(reports: Sequence[LoadReport]) -> Tensor:
    """Return all reports as one matrix, so that one reduction or one transfer logs them all.

    Args:
        reports: of one kind and device, such as those of all layers; at least one.

    Returns:
        (reports, fields), float64, with the columns of `type(report).names()`; booleans are 0 or 1.
        Nothing is read back: the caller's `.tolist()` is the only wait.

    Raises:
        TypeError: what is given is not a list or tuple of reports of one kind.
        ValueError: there is none.

    Note:
        A mean of this over ranks is the mean of the ranks' balances, not the balance of all their
        tokens: that is `measure_load` of counts and masses that were added over the ranks.
    """
    check_reports(reports)
    if not reports:
        raise ValueError("`reports` must hold at least one report, got none.")
    kinds = {type(report) for report in reports}
    if len(kinds) > 1:
        names = sorted(kind.__name__ for kind in kinds)
        raise TypeError(f"`reports` must be of one kind, got {names}.")
    columns = [field.name for field in fields(reports[0])]
    values = [getattr(report, name).double() for report in reports for name in columns]
    return torch.stack(values).view(len(reports), len(columns))


def check_reports(reports: Sequence[LoadReport]) -> None:
    """Raise unless these are reports in a list or a tuple."""
    if isinstance(reports, LoadReport):
        raise TypeError(
            f"`reports` must be a list, one report a layer, got {type(reports).__name__}; "
            "give `[report]`."
        )
    if not isinstance(reports, list | tuple) or not all(isinstance(r, LoadReport) for r in reports):
        raise TypeError(
            "`reports` must be a list of what `measure_balance` or `measure_load` returned, "
            f"got {type(reports).__name__}."
        )


@torch.no_grad()
def measure_load(
    counts_E: Tensor,
    mass_E: Tensor,
    *,
    kept_counts_E: Tensor | None = None,
    num_ranks: int = 1,
) -> LoadReport:
    """Measure the balance of a layer from its sums over tokens, ranks and microbatches.

    Args:
        counts_E: routes requested of each expert, integer or float (an average over ranks, say),
            not negative.
        mass_E: normalised scores of each expert, summed over the same tokens; float, any scale. Of
            one batch it is

                scores_TE = torch.where(mask_T[:, None], scores_TE, 0.0)
                mass_E = (scores_TE / scores_TE.sum(1, keepdim=True).clamp(min=1e-20)).sum(0)
        kept_counts_E: those of the routes that were not dropped, integer or float, between 0 and
            `counts_E`; None = all were kept.
        num_ranks: expert-parallel ranks, each of which holds E / num_ranks experts in order.

    Returns:
        The `LoadReport`, float64, with f = counts over the routes that exist (`measure_balance`
        divides by K T, so routes of -1 lower its loss). Nothing is read back from the device.

    Raises:
        TypeError: a dtype is not as above, or `num_ranks` is not an int.
        ValueError: the vectors are not of one length and device, `num_ranks` does not divide it, or
            (read on the CPU only) a value is out of range.
    """
    _check_counts("counts_E", counts_E)
    check_tensor("mass_E", mass_E)
    if not mass_E.is_floating_point():
        raise TypeError(f"`mass_E` must be a floating-point tensor, got {mass_E.dtype}.")
    if counts_E.ndim != 1 or counts_E.shape != mass_E.shape or not len(counts_E):
        raise ValueError(
            "`counts_E` and `mass_E` must be vectors of one length, "
            f"got {tuple(counts_E.shape)} and {tuple(mass_E.shape)}."
        )
    check_same_device("mass_E", mass_E, "counts_E", counts_E)
    check_ranks(num_ranks, len(counts_E))
    check_kept_counts(kept_counts_E, counts_E)
    counts_E, mass_E = counts_E.double(), mass_E.double()
    kept_E = counts_E if kept_counts_E is None else kept_counts_E.double()
    mean_scores_E = mass_E / mass_E.sum().clamp(min=1e-30)
    return load_report(counts_E, mean_scores_E, counts_E.sum(), kept_E, num_ranks)


def check_ranks(num_ranks: int, num_experts: int) -> None:
    """Raise unless the experts fall onto so many ranks evenly."""
    check_positive("num_ranks", num_ranks)
    if num_experts % num_ranks:
        raise ValueError(f"`num_ranks` must divide the {num_experts} experts, got {num_ranks}.")


def check_kept_counts(kept_counts_E: Tensor | None, counts_E: Tensor) -> None:
    """Raise unless there is one kept count an expert, from 0 to what was requested."""
    if kept_counts_E is None:
        return
    _check_counts("kept_counts_E", kept_counts_E)
    if kept_counts_E.shape != counts_E.shape:
        raise ValueError(
            f"`kept_counts_E` must have shape {tuple(counts_E.shape)}, "
            f"got {tuple(kept_counts_E.shape)}."
        )
    check_same_device("kept_counts_E", kept_counts_E, "counts_E", counts_E)
    if can_read(kept_counts_E, counts_E) and bool((kept_counts_E > counts_E).any()):
        raise ValueError(
            "`kept_counts_E` must not exceed the requested routes of any expert, "
            f"got {kept_counts_E.tolist()} of {counts_E.tolist()}."
        )


def _check_counts(name: str, counts_E: Tensor) -> None:
    check_tensor(name, counts_E)
    if counts_E.dtype == torch.bool or counts_E.is_complex():
        raise TypeError(f"`{name}` must hold numbers of routes, got {counts_E.dtype}.")
    if can_read(counts_E) and bool((counts_E < 0).any()):
        raise ValueError(f"`{name}` must not be negative, got {counts_E.tolist()}.")


def load_report(
    counts_E: Tensor, mean_scores_E: Tensor, slots: Tensor, kept_E: Tensor, num_ranks: int
) -> LoadReport:
    """Return the report for f = counts / `slots` and P = `mean_scores_E`, in the dtype of P."""
    num_experts, dtype = len(counts_E), mean_scores_E.dtype
    total = counts_E.sum()
    # Not a clamp: counts may be fractions, as averages over ranks are.
    some, slots = (torch.where(number > 0, number, 1) for number in (total, slots))
    # E * counts - total is an exact integer: equal loads deviate by exactly 0.
    excess_E = (num_experts * counts_E - total).to(dtype) / num_experts
    deviation_E = excess_E / slots
    score_deviation_E = mean_scores_E - mean_scores_E.mean()
    covariance = (deviation_E * score_deviation_E).sum()
    variance = deviation_E.square().sum()
    even = variance == 0
    entropy = torch.special.entr(counts_E.to(dtype) / some).sum()
    deficit = 1 - entropy / math.log(num_experts) if num_experts > 1 else torch.zeros_like(entropy)
    imbalance = _imbalance(counts_E, 1, dtype)
    loss = num_experts * (counts_E.to(dtype) / slots * mean_scores_E).sum()
    return LoadReport(
        routes=total.to(dtype),
        imbalance=imbalance,
        rank_imbalance=_imbalance(counts_E, num_experts // num_ranks, dtype),
        kept_imbalance=_imbalance(kept_E, 1, dtype),
        kept_rank_imbalance=_imbalance(kept_E, num_experts // num_ranks, dtype),
        dropped_routes=(total - kept_E.sum()).to(dtype) / some,
        entropy_deficit=torch.where(total > 0, deficit, 0.0),
        coefficient_of_variation=excess_E.square().mean().sqrt() * num_experts / some,
        score_variation=score_deviation_E.square().mean().sqrt() * num_experts,
        dead_experts=(counts_E == 0).sum(),
        dead_mass=torch.where(counts_E == 0, mean_scores_E, 0.0).sum(),
        balance_loss=loss,
        cross_term=num_experts * covariance,
        honesty=torch.where(even, 1.0, covariance / torch.where(even, 1.0, variance)),
        gerrymandered=(loss < 1 - ROUNDING) & (imbalance > 1 + ROUNDING),
    )


def _imbalance(counts_E: Tensor, experts_per_rank: int, dtype: torch.dtype) -> Tensor:
    """Return the largest over the mean of the sums over consecutive experts; 1 without a route."""
    counts_Q = counts_E.view(-1, experts_per_rank).sum(1)
    total = counts_Q.sum()
    largest = counts_Q.max().to(dtype) * len(counts_Q)
    return torch.where(total > 0, largest / torch.where(total > 0, total, 1), 1.0)
