"""Train one model under one balance loss and record what its routing does.

Shapes: B sequences, S positions, L layers.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from model import ByteModel, Sizes
from olmo_routing import (
    BalanceReport,
    GerrymanderAlarm,
    Routing,
    balance_loss,
    margin_balance_loss,
    measure_balance,
    stack_reports,
)
from text import Text, draw_batch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A balance loss and its coefficient; the objective is CE + coefficient * sum over layers."""

    loss: Literal["ordinary", "margin"]
    coefficient: float

    @property
    def name(self) -> str:
        """As in reports, such as "ordinary 3"."""
        return f"{self.loss} {self.coefficient:g}" if self.coefficient else "no balance loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What all arms share."""

    sizes: Sizes
    steps: int
    batch: int
    per_sequence: bool
    learning_rate: float
    device: str
    evaluations: int = 40
    held_out_sequences: int = 64

    @property
    def is_mixed(self) -> bool:
        """Whether products are BF16, as on a GPU; gates, weights and losses are float32 always."""
        return self.device.startswith("cuda")

    def precision(self) -> torch.autocast:
        """Return the context of a forward."""
        kind = "cuda" if self.is_mixed else "cpu"
        return torch.autocast(kind, torch.bfloat16, enabled=self.is_mixed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A run at one step, on the same held-out bytes each time.

    Attributes:
        step: optimizer steps taken.
        language_loss: nats a byte.
        trained_loss: the arm's own balance loss in its own scope, mean over layers.
        ordinary_loss: E f.P, mean over layers.
        worst_load: the busiest expert's routes over the mean, of the worst layer.
        mean_load: the same, mean over layers.
        dead_experts: experts without a route, of all layers.
        dead_mass: probability on experts without a route, mean over layers.
        honesty: cov(f, P) / var(f), mean over layers.
        topk_margin: K-th less next score, mean over tokens and layers.
        alarm: share of the layers and steps since the last point at which the alarm was on.
    """

    step: int
    language_loss: float
    trained_loss: float
    ordinary_loss: float
    worst_load: float
    mean_load: float
    dead_experts: float
    dead_mass: float
    honesty: float
    topk_margin: float
    alarm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One arm with one seed. `first_alarm` is the first step at which any layer's alarm was on."""

    arm: Arm
    seed: int
    points: list[Point]
    first_alarm: int | None


def train(arm: Arm, seed: int, recipe: Recipe, text: Text) -> Run:
    """Train; arms with the same seed begin with the same weights and see the same batches."""
    torch.manual_seed(seed)
    sizes, device = recipe.sizes, recipe.device
    model = ByteModel(sizes).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    generator = torch.Generator().manual_seed(seed)
    # The same for every seed, so that seeds differ by their training alone.
    fixed = torch.Generator().manual_seed(0)
    held_out_BS = draw_batch(text.held_out, recipe.held_out_sequences, sizes.length, fixed)
    held_out_BS = held_out_BS.to(device)
    watch = _Watch(recipe)
    points = []
    every = max(1, recipe.steps // recipe.evaluations)
    for step in range(recipe.steps + 1):
        if step % every == 0 or step == recipe.steps:
            points.append(_evaluate(model, arm, recipe, held_out_BS, step, watch.share()))
        if step == recipe.steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(step, recipe.steps)
        bytes_BS = draw_batch(text.train, recipe.batch, sizes.length, generator).to(device)
        with recipe.precision():
            logits, routings = model(bytes_BS[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), bytes_BS[:, 1:].flatten())
        if arm.coefficient:
            loss = loss + arm.coefficient * _balance_losses(arm, recipe, routings).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        watch.see(step, routings)
    return Run(arm=arm, seed=seed, points=points, first_alarm=watch.first_alarm)


class _Watch:
    """The alarm over the training batches, and the share of layers and steps it was on."""

    def __init__(self, recipe: Recipe) -> None:
        sizes = recipe.sizes
        window = max(20, min(200, recipe.steps // 4))
        self.alarm = GerrymanderAlarm(
            sizes.experts, num_layers=sizes.layers, window=window, device=recipe.device
        )
        self.first_alarm: int | None = None
        self._seen: list[float] = []

    def see(self, step: int, routings: list[Routing]) -> None:
        """Measure a training batch and add it to the alarm's window."""
        on_L = self.alarm.update(
            [measure_balance(r.scores_TE.detach(), r.expert_ids_TK) for r in routings]
        )
        on = on_L.float().mean().item()
        self._seen.append(on)
        if self.first_alarm is None and on:
            self.first_alarm = step

    def share(self) -> float:
        """Return the share of alarms since the last call; 0 when nothing came."""
        seen, self._seen = self._seen or [0.0], []
        return math.fsum(seen) / len(seen)


def _schedule(step: int, steps: int) -> float:
    """Warm up over a twentieth of the steps, then stay."""
    return min(1.0, (step + 1) / max(1, steps // 20))


def _balance_losses(arm: Arm, recipe: Recipe, routings: list[Routing]) -> Tensor:
    """Return the arm's balance loss of every layer."""
    losses = []
    for routing in routings:
        tokens = len(routing.scores_TE)
        sequences = tokens // recipe.sizes.length if recipe.per_sequence else 1
        of = margin_balance_loss if arm.loss == "margin" else balance_loss
        losses.append(of(routing.scores_TE, routing.expert_ids_TK, num_sequences=sequences))
    return torch.stack(losses)


@torch.no_grad()
def _evaluate(
    model: ByteModel,
    arm: Arm,
    recipe: Recipe,
    bytes_BS: Tensor,
    step: int,
    alarm: float,
) -> Point:
    with recipe.precision():
        logits, routings = model(bytes_BS[:, :-1])
    language = F.cross_entropy(logits.flatten(0, 1).float(), bytes_BS[:, 1:].flatten())
    trained = _balance_losses(arm, recipe, routings).mean()
    table = stack_reports([measure_balance(r.scores_TE, r.expert_ids_TK) for r in routings])
    column = {name: table[:, i].tolist() for i, name in enumerate(BalanceReport.names())}

    def mean(name: str) -> float:
        return math.fsum(column[name]) / len(column[name])

    return Point(
        step=step,
        language_loss=float(language),
        trained_loss=float(trained),
        ordinary_loss=mean("balance_loss"),
        worst_load=max(column["imbalance"]),
        mean_load=mean("imbalance"),
        dead_experts=sum(column["dead_experts"]),
        dead_mass=mean("dead_mass"),
        honesty=mean("honesty"),
        topk_margin=mean("topk_margin"),
        alarm=alarm,
    )
