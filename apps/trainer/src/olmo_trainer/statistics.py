"""What a step counted, in one vector, so that one reduction over the world logs it all.

Every rank adds what its own stages and tokens saw; entries of other stages stay zero; the sum over
all ranks is the whole step's. Float64, on the device: counts stay exact. The host reads a copy.
"""

import math
from dataclasses import dataclass

import torch
from olmo_ep_comm import Dispatched
from olmo_routing import BalanceReport, LoadReport, Routing, measure_balance, measure_load

from olmo_trainer.config import ModelConfig

# Sums of the step, before those of its layers.
_OF_THE_STEP = (
    "loss",  # cross entropy
    "auxiliary_loss",
    "tokens",  # that are targets
    "stops",  # ranks that ask for one
    "head_z_loss",
    "dropped",  # routes that found no room
    "failed_saves",
    "attention_flops",  # where documents are apart
)
# Kept rows are counted where they arrive, and nobody there knows which routes a token lost.
_UNKNOWN = ("tokens_with_drops",)
_OF_THE_WEIGHTS = ("dropped_weight",)
# What a layer's sums of counts, scores and weights do not tell: means over tokens, added as shares.
OF_THE_TOKENS = tuple(
    name
    for name in BalanceReport.names()
    if name not in (*LoadReport.names(), *_UNKNOWN, *_OF_THE_WEIGHTS)
)


@dataclass(frozen=True)
class LayerBalance:
    """How one routed layer used its experts in a step; plain numbers."""

    counts: list[int]
    balance_loss: float
    z_loss: float
    imbalance: float
    entropy_deficit: float
    dead_experts: int
    honesty: float
    report: dict[str, float]  # of `measure_balance`, these included; not `tokens_with_drops`


@dataclass(frozen=True)
class StepTotals:
    """The sums of a step over all ranks; plain numbers."""

    loss: float
    auxiliary_loss: float
    tokens: int
    stop: bool
    head_z_loss: float
    dropped: int
    save_failed: bool
    attention_flops: float


class StepSums:
    """The sums of a step as one line of float64, where they are counted or where they are read.

    Args:
        model: Whose layers and experts.
        vector: As long as `num_sums(model)`.
    """

    def __init__(self, model: ModelConfig, vector: torch.Tensor) -> None:
        self.moe_layers = model.moe_layers
        self.num_experts = model.moe.num_experts
        self.vector = vector  # reduce it over the world in place
        E = self.num_experts
        self._of_the_step = {name: vector[place] for place, name in enumerate(_OF_THE_STEP)}
        rows = vector[len(_OF_THE_STEP) :].view(len(self.moe_layers), _num_columns(model))
        self._counts_LE = rows[:, :E]
        self._mass_LE = rows[:, E : 2 * E]
        self._kept_LE = rows[:, 2 * E : 3 * E]  # routes that found room
        self._weights_L2 = rows[:, 3 * E : 3 * E + 2]  # combine weights: requested and kept
        self._losses_L2 = rows[:, 3 * E + 2 : 3 * E + 4]  # balance loss and z-loss
        self._of_the_tokens_LM = rows[:, 3 * E + 4 :]

    @property
    def loss(self) -> torch.Tensor:
        """The mean cross entropy of the global batch, 0-d float64, after the reduction."""
        return self._of_the_step["loss"]

    def counts(self, layer: int) -> torch.Tensor:
        """Return `counts_E` (int64) of a layer."""
        return self._counts_LE[layer - self.moe_layers.start].round().to(torch.int64)

    def dropped_part(self) -> float | None:
        """Return the part of all requested routes that found no room; reads the vector.

        `None` where the loss is not finite: scores that are NaN choose the same experts for every
        token. The same on every rank after the reduction over the world.
        """
        dropped, loss, requested = torch.stack(
            (self._of_the_step["dropped"], self.loss, self._counts_LE.sum())
        ).tolist()
        return dropped / max(requested, 1.0) if math.isfinite(loss) else None

    def totals(self) -> StepTotals:
        """Return the losses, the number of targets, and what a rank asked for or reported.

        Reads the vector, as `layers` does; call after the reduction over the world.
        """
        sums = dict(zip(_OF_THE_STEP, self.vector[: len(_OF_THE_STEP)].tolist(), strict=True))
        return StepTotals(
            loss=sums["loss"],
            auxiliary_loss=sums["auxiliary_loss"],
            tokens=round(sums["tokens"]),
            stop=sums["stops"] > 0,
            head_z_loss=sums["head_z_loss"],
            dropped=round(sums["dropped"]),
            save_failed=sums["failed_saves"] > 0,
            attention_flops=sums["attention_flops"],
        )

    def layers(self, *, num_ranks: int = 1) -> list[LayerBalance]:
        """Return how each routed layer used its experts, which `num_ranks` ranks share out."""
        reports = [
            measure_load(counts, mass, kept_counts_E=kept, num_ranks=num_ranks)
            for counts, mass, kept in zip(
                *(self._counts_LE.cpu(), self._mass_LE.cpu(), self._kept_LE.cpu()), strict=True
            )
        ]
        return [
            LayerBalance(
                counts=[round(count) for count in counts],
                balance_loss=balance_loss,
                z_loss=z_loss,
                imbalance=report.imbalance.item(),
                entropy_deficit=report.entropy_deficit.item(),
                dead_experts=int(report.dead_experts),
                honesty=report.honesty.item(),
                report={
                    **{name: float(getattr(report, name)) for name in LoadReport.names()},
                    # Sums in another order differ by rounding, also where nothing is missing.
                    "dropped_weight": 1 - kept / requested if report.dropped_routes > 0 else 0.0,
                    **dict(zip(OF_THE_TOKENS, of_the_tokens, strict=True)),
                },
            )
            for counts, (requested, kept), (balance_loss, z_loss), of_the_tokens, report in zip(
                self._counts_LE.tolist(),
                self._weights_L2.tolist(),
                self._losses_L2.tolist(),
                self._of_the_tokens_LM.tolist(),
                reports,
                strict=True,
            )
        ]


class StepStatistics(StepSums):
    """Running sums of a step: the losses, and for each routed layer counts and score mass."""

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        super().__init__(model, torch.zeros(num_sums(model), dtype=torch.float64, device=device))

    def zero(self) -> None:
        """Start a step."""
        self.vector.zero_()

    def add_loss(self, loss: torch.Tensor, num_targets: torch.Tensor) -> None:
        """Add a microbatch's share of the mean cross entropy, and its number of targets."""
        self._of_the_step["loss"] += loss.detach()
        self._of_the_step["tokens"] += num_targets

    def add_head_z_loss(self, loss: torch.Tensor) -> None:
        """Add a microbatch's share of the head's mean z-loss, before its coefficient."""
        self._of_the_step["head_z_loss"] += loss.detach()

    def add_dispatched(self, layer: int, sent: Dispatched, *, local_experts: range) -> None:
        """Add a microbatch's rows of the experts held here, and the routes that tokens here lost.

        Waits for nothing. Called outside of what recompute runs twice, as `add_routing`.
        """
        row = layer - self.moe_layers.start
        ends = sent.offsets_E
        self._of_the_step["dropped"] += sent.num_dropped
        kept = torch.diff(ends, prepend=ends.new_zeros(1))
        self._kept_LE[row, local_experts.start : local_experts.stop] += kept
        weights_R = sent.row_weights_R.detach()
        is_row_R = torch.arange(len(weights_R), device=ends.device) < ends[-1]
        # What lies behind the rows is undefined, and may be NaN.
        self._weights_L2[row, 1] += torch.where(is_row_R, weights_R, 0.0).double().sum()

    def add_auxiliary(self, loss: torch.Tensor) -> None:
        """Add a microbatch's share of the weighted auxiliary losses."""
        self._of_the_step["auxiliary_loss"] += loss.detach()

    def request_stop(self) -> None:
        """Ask every rank to stop after this step."""
        self._of_the_step["stops"] += 1.0

    def report_failed_save(self) -> None:
        """Tell every rank that a save in the background came to nothing."""
        self._of_the_step["failed_saves"] += 1.0

    def add_attention(self, flops: float) -> None:
        """Add the useful operations of attention in documents, of which one rank is to tell."""
        self._of_the_step["attention_flops"] += flops

    def add_routing(
        self,
        layer: int,
        routing: Routing,
        mask_T: torch.Tensor,
        balance_share: torch.Tensor,
        z_share: torch.Tensor,
        token_share: torch.Tensor,
    ) -> None:
        """Add a microbatch's routing of a layer; shares are weighted by its part of the tokens.

        Called outside of what recompute runs twice, once a microbatch.
        """
        row = layer - self.moe_layers.start
        scores = routing.scores_TE.detach()
        scores = scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
        self._counts_LE[row] += routing.counts_E
        self._mass_LE[row] += (scores * mask_T[:, None]).sum(0)
        is_route_TK = routing.expert_ids_TK >= 0
        weights_TK = routing.weights_TK.detach()
        self._weights_L2[row, 0] += torch.where(is_route_TK, weights_TK, 0.0).double().sum()
        self._losses_L2[row] += torch.stack((balance_share.detach(), z_share.detach()))
        report = measure_balance(
            routing.scores_TE.detach(),
            routing.expert_ids_TK,
            mask_T=mask_T,
        )
        means = torch.stack([getattr(report, name) for name in OF_THE_TOKENS])
        self._of_the_tokens_LM[row] += token_share * means


def num_sums(model: ModelConfig) -> int:
    """Return how many numbers a step counts."""
    return len(_OF_THE_STEP) + len(model.moe_layers) * _num_columns(model)


def _num_columns(model: ModelConfig) -> int:
    return 3 * model.moe.num_experts + 4 + len(OF_THE_TOKENS)
