"""What the host wants to know of a step, copied without waiting for the device and read later.

    step s:      launch everything, copy its numbers to pinned memory, mark the end of the stream
    step s + 1:  launch everything, then wait for the mark of s, which is a whole step back

So the device always has a step in hand while the host reads the one before, and never waits for
it. Which step is read when is a function of the steps alone, never of how far a device has come:
ranks decide alike. Where the host waits for nothing, as on a CPU, a step is read at its end.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from olmo_trainer.build import Assembly
from olmo_trainer.metrics import StepRecord
from olmo_trainer.phases import PhaseClock, StepMarks
from olmo_trainer.rerun import Reruns
from olmo_trainer.statistics import LayerBalance, StepSums, StepTotals, num_sums
from olmo_trainer.step import Update, check_update


@dataclass(frozen=True)
class StepResult:
    """A step that is over.

    Attributes:
        record: What is written down of it.
        totals: Its sums over all ranks.
        reasons: Why it was left out; empty = it was not.
        reruns: How often it was run, and with how much room.
    """

    record: StepRecord
    totals: StepTotals
    reasons: tuple[str, ...]
    reruns: Reruns


@dataclass(frozen=True)
class _Pending:
    step: int
    rate: float
    numbers: torch.Tensor  # on the host, float64: sums, norm, verdict; whole once the marks passed
    marks: StepMarks
    reruns: Reruns


class StepReader:
    """Takes the steps as they are launched and gives them back, in order, when they are over.

    Args:
        assembly: This rank's parts.
        flops_per_token: Useful operations, but those of attention that a step counts itself.
        peak: Operations a second that one device can do at best; `None` = not known.
    """

    def __init__(self, assembly: Assembly, *, flops_per_token: float, peak: float | None) -> None:
        self._assembly = assembly
        self._flops_per_token = flops_per_token
        self._peak = peak
        self._lag = 1 if assembly.mesh.host_waits else 0
        self._pending: deque[_Pending] = deque()

    def take(self, step: int, rate: float, updated: Update, clock: PhaseClock) -> None:
        """Take a step that was launched: start the copy of its numbers and end it on the clock.

        Args:
            step: From 1.
            rate: The learning rate of its update.
            updated: How that went.
            clock: Times the step's phases.
        """
        # One copy of one line: float64 holds float32 and the counts of any run exactly.
        line = torch.cat(
            [
                self._assembly.statistics.vector,
                updated.norm.double()[None],
                updated.verdict.double(),
            ]
        )
        numbers = line.to("cpu", non_blocking=True)  # torch takes pinned memory for it
        self._pending.append(_Pending(step, rate, numbers, clock.end(), updated.reruns))

    def is_due(self, *, at_once: bool) -> bool:
        """Whether there is a step to read: one that is a step back, or `at_once` any."""
        return len(self._pending) > (0 if at_once else self._lag)

    def read(self) -> StepResult:
        """Wait for the earliest step that was not read and return it.

        Raises:
            NonFiniteError: On every rank alike: see `check_update`.
        """
        pending = self._pending.popleft()
        pending.marks.wait()
        model = self._assembly.config.model
        size = num_sums(model)
        norm, *verdict = pending.numbers[size:].tolist()
        skips = check_update(self._assembly, pending.step, norm, verdict)
        sums = StepSums(model, pending.numbers[:size])
        totals = sums.totals()
        phases = pending.marks.seconds()
        seconds = sum(phases.values())
        flops = (totals.tokens * self._flops_per_token + totals.attention_flops) / seconds
        world = self._assembly.mesh.world
        record = StepRecord(
            step=pending.step,
            loss=totals.loss,
            auxiliary_loss=totals.auxiliary_loss,
            grad_norm=norm,
            learning_rate=pending.rate,
            tokens=totals.tokens,
            seconds=seconds,
            tokens_per_second=totals.tokens / seconds,
            head_z_loss=totals.head_z_loss if self._assembly.config.loss.z_loss else None,
            dropped=totals.dropped,
            skipped=int(bool(skips.reasons)),
            num_skipped=skips.total,
            reruns=pending.reruns.times,
            capacity_factor=pending.reruns.capacity_factor,
            over_capacity=int(pending.reruns.over_limit),
            phase_seconds=phases,
            flops_per_second=flops,
            model_flops_utilization=None if self._peak is None else flops / world / self._peak,
            **_of_layers(sums.layers(num_ranks=self._assembly.mesh.num_expert)),
        )
        return StepResult(record, totals, skips.reasons, pending.reruns)


def _of_layers(layers: Sequence[LayerBalance]) -> dict[str, Any]:
    """Return what a record says of routed layers."""
    return {
        "balance_loss": _mean([layer.balance_loss for layer in layers]),
        "z_loss": _mean([layer.z_loss for layer in layers]),
        "routes": sum(sum(layer.counts) for layer in layers),
        "worst_imbalance": max((layer.imbalance for layer in layers), default=None),
        "expert_counts": [layer.counts for layer in layers],
        "imbalance": [layer.imbalance for layer in layers],
        "honesty": [layer.honesty for layer in layers],
        "entropy_deficit": [layer.entropy_deficit for layer in layers],
        "dead_experts": [layer.dead_experts for layer in layers],
        "balance": {
            name: [layer.report[name] for layer in layers]
            for name in (layers[0].report if layers else ())
        },
        "z_losses": [layer.z_loss for layer in layers],
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
