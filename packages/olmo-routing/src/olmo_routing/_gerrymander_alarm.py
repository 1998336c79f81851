"""An alarm over many steps: the balance loss no longer speaks of the load.

One batch proves little: with few tokens chance alone takes the loss E * f.P below 1, and the ratio
cov(f, P) / var(f) of nearly even loads is noise over noise. Over a window of steps the two sides

    x = E * f.P - 1 = E * cov(f, P)                  what the loss sees of the load, and
    y = E * sum f^2 - 1 - (E - 1) / N = E * var(f) - (E - 1) / N        what there is to see

can be told apart, N being the routes of a step. (E - 1) / N is what the sampling of N routes adds
to E * var(f) where all experts are equally likely, and no less than what it adds elsewhere. Of an
honest router, which draws each route from its token's probabilities, y is in expectation at most x,
and less by a share of 1 / N at equal tokens: the two fall and rise together. The alarm is on when

1. the loss is below 1 beyond chance, over the steps of the window so far:

       sum of N x < -log(1e9).

   For an honest router E[exp(-N x)] <= 1 whatever P, E and N are: a route of a token with
   probabilities p multiplies it by sum_e p_e exp(1 - E P_e), the mean of this over tokens is the
   mean over experts of u exp(1 - u) with u = E P_e, and u exp(1 - u) <= 1; independent tokens and
   steps multiply. So by Markov's inequality this rule is false at most once in 1e9 updates.

2. the loss is blind or worse while the load is uneven, over a full window:

       sum of N x < least_honesty * sum of N y,
       sum of N y > 2 sqrt(d c) + 2 c,   d = (E - 1) W,  c = log(1e9),   and
       mean imbalance > least_imbalance.

   The first is a ratio of sums, so that even steps do not drown it, and free of the variance that
   sampling adds. The second is beyond chance: at even probabilities the sum of N (y + (E - 1) / N)
   is Pearson's statistic, about chi-squared with d degrees of freedom, which exceeds d by this
   once in 1e9 (Laurent and Massart 2000, lemma 1). Small batches have a large imbalance by chance,
   and it is the second that keeps them quiet; the third asks large ones for more than they can
   prove.

3. from the older half of a full window to the newer x falls and y rises, each by more than five
   standard errors of its own steps, the mean imbalance rises by more than 5 %, and the newer half
   is uneven as in 2.

The bound of 1 holds for independent routes; where a token's routes must differ, and its mass fills
less than its K places, honest routers can have a loss below 1 as well, and 1 finds them: the mass
and the load do disagree. Routes that depend on each other beyond their probabilities, as those of
a real top-k, have no such bound: the rule then says that the loss is below 1 in the mean of the
window. Shapes: W steps, L layers, E experts.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ._checks import check_number, check_positive
from ._expert_load import ROUNDING, LoadReport, check_reports
from ._float32_buffers import Float32Buffers

_LOG_ODDS = math.log(1e9)
_STANDARD_ERRORS = 5.0
_LEAST_RISE = 1.05
# Five standard errors of fewer than ten steps a half are not rare.
_LEAST_WINDOW = 20


class GerrymanderAlarm(Float32Buffers):
    """Watch the balance reports of layers over a window of steps, on the device.

    Args:
        num_experts: E of every layer.
        num_layers: L.
        window: steps, at least 20. 200 are long enough that the batches' chance averages out, and
            short beside any training run.
        least_honesty: the pooled cov(f, P) / var(f) below which the loss counts as blind, in
            [0, 1). At 0.05 the loss sees a twentieth of the unevenness that there is.
        least_imbalance: busiest expert over the mean above which a load counts as uneven that is so
            beyond chance; finite and at least 1. At 1.25 the busiest has a quarter over its share.
        device: of the buffer.

    Attributes:
        history_4WL: float32; N, x, y and imbalance of the window's steps, oldest first; NaN before
            the first steps. Saved with the model, so that a resumed run keeps its window. It stays
            float32 in a model of a lower precision, which cannot count the routes of a step.

    Raises:
        TypeError: a size is not an int, or a threshold not a number.
        ValueError: an argument is out of range.
    """

    history_4WL: Tensor

    def __init__(
        self,
        num_experts: int,
        *,
        num_layers: int = 1,
        window: int = 200,
        least_honesty: float = 0.05,
        least_imbalance: float = 1.25,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_positive("num_experts", num_experts)
        check_positive("num_layers", num_layers)
        check_positive("window", window, least=_LEAST_WINDOW)
        check_number("least_honesty", least_honesty)
        check_number("least_imbalance", least_imbalance)
        if not 0 <= least_honesty < 1:
            raise ValueError(f"`least_honesty` must be in [0, 1), got {least_honesty}.")
        if not 1 <= least_imbalance < math.inf:
            raise ValueError(
                f"`least_imbalance` must be finite and at least 1, got {least_imbalance}."
            )
        self.num_experts = num_experts
        self.least_honesty = least_honesty
        self.least_imbalance = least_imbalance
        history = torch.empty(4, window, num_layers, dtype=torch.float32, device=device)
        self.register_buffer("history_4WL", history)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Forget all steps, in place: a start afresh, also after the meta device."""
        nn.init.constant_(self.history_4WL, math.nan)

    def update(self, reports: Sequence[LoadReport]) -> Tensor:
        """Add a step and return whether the alarm is on.

        Args:
            reports: of this step, one a layer, on the device of the buffer: from `measure_balance`,
                or from `measure_load` of all ranks and microbatches, which hears more.

        Returns:
            bool, (L,), on the device. Nothing is read back. A step that is not finite counts as
            missing: a window with one is not full. A step without routes counts as even.

        Raises:
            TypeError: what is given is not a list or tuple of reports.
            ValueError: there is not one report a layer.
        """
        check_reports(reports)
        num_layers = self.history_4WL.shape[2]
        if len(reports) != num_layers:
            raise ValueError(
                f"`reports` must hold one report for each of `num_layers`={num_layers} layers, "
                f"got {len(reports)}."
            )
        newest_41L = self._measure(reports).detach()[:, None].to(self.history_4WL.dtype)
        # Not a ring: a position that the host counts would be lost when a run resumes.
        self.history_4WL.copy_(torch.cat([self.history_4WL[:, 1:], newest_41L], dim=1))
        routes_WL, seen_WL, load_WL, imbalance_WL = self.history_4WL
        full_L = self.history_4WL.isfinite().all(0).all(0)
        # Float32 sums over tokens are exact to about ROUNDING.
        below_L = (routes_WL * (seen_WL + ROUNDING)).nansum(0) < -_LOG_ODDS
        seen_L, load_L = (routes_WL * seen_WL).sum(0), (routes_WL * load_WL).sum(0)
        blind_L = seen_L < self.least_honesty * load_L
        half = len(routes_WL) // 2
        diverges_L = (
            _rises(-seen_WL, half)
            & _rises(load_WL, half)
            & (imbalance_WL[half:].mean(0) > _LEAST_RISE * imbalance_WL[:half].mean(0))
            & self._uneven(routes_WL[half:], load_WL[half:], imbalance_WL[half:])
        )
        blind_L = blind_L & self._uneven(routes_WL, load_WL, imbalance_WL)
        return below_L | (full_L & (blind_L | diverges_L))

    def _measure(self, reports: Sequence[LoadReport]) -> Tensor:
        """Return N, x, y and imbalance of each layer, all NaN where one of them is not finite."""

        def column(name: str) -> Tensor:
            return torch.stack([getattr(report, name) for report in reports]).double()

        routes_L = column("routes")
        chance_L = (self.num_experts - 1) / routes_L.clamp(min=1)
        load_L = column("coefficient_of_variation").square() - chance_L
        measures_4L = torch.stack([routes_L, column("cross_term"), load_L, column("imbalance")])
        return torch.where(measures_4L.isfinite().all(0), measures_4L, math.nan)

    def _uneven(self, routes_WL: Tensor, load_WL: Tensor, imbalance_WL: Tensor) -> Tensor:
        degrees = (self.num_experts - 1) * len(routes_WL)
        chance = 2 * math.sqrt(degrees * _LOG_ODDS) + 2 * _LOG_ODDS
        beyond_chance_L = (routes_WL * load_WL).sum(0) > chance
        return beyond_chance_L & (imbalance_WL.mean(0) > self.least_imbalance)

    def extra_repr(self) -> str:
        """Return what `repr` shows."""
        _, window, num_layers = self.history_4WL.shape
        return (
            f"num_experts={self.num_experts}, num_layers={num_layers}, window={window}, "
            f"least_honesty={self.least_honesty}, least_imbalance={self.least_imbalance}"
        )


def _rises(series_WL: Tensor, half: int) -> Tensor:
    """Return where the mean of the newer half is above that of the older beyond its noise."""
    old_L, new_L = series_WL[:half].mean(0), series_WL[half:].mean(0)
    noise_L = series_WL[:half].var(0) / half + series_WL[half:].var(0) / (len(series_WL) - half)
    return new_L - old_L > _STANDARD_ERRORS * noise_L.sqrt()
