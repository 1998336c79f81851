"""What the actions of a pipeline cost: one unit of time for all, chosen by the caller.

A whole backward costs `backward`. Its halves cost half of it each unless they are given; with
matrix products alone the two are equal, and each is as much as the forward.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from ._schedule import Kind

Cost = float | Sequence[float]

_LARGEST = 1e100  # so that sums of many are finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Times of the actions and of a message.

    Args:
        forward: Cost of one forward: one number, or one per stage. Positive.
        backward: Cost of one whole backward, likewise.
        input_gradient: Cost of one input gradient, likewise; None for half of `backward`.
        weight_gradient: Cost of one weight gradient, likewise; None for what is left of `backward`
            when `input_gradient` is given, else half of it.
        transfer: Time that a message between neighbouring stages on different ranks takes: one
            number, or one per pair (s, s + 1), for both directions. Not below 0. It delays only the
            action that takes the message in.
    """

    forward: Cost = 1.0
    backward: Cost = 2.0
    input_gradient: Cost | None = None
    weight_gradient: Cost | None = None
    transfer: Cost = 0.0

    def by_stage(self, num_stages: int) -> "StageCosts":
        """Return one number per stage and kind.

        Raises:
            ValueError: If a cost is not positive and finite or above 1e100, a transfer is below 0
                or not finite, or a sequence has another length than the number of stages (pairs for
                `transfer`).
            TypeError: If a cost is no number.
        """
        forward = _numbers("forward", self.forward, num_stages)
        backward = _numbers("backward", self.backward, num_stages)
        if self.input_gradient is not None:
            inputs = _numbers("input_gradient", self.input_gradient, num_stages)
        elif self.weight_gradient is not None:
            given = _numbers("weight_gradient", self.weight_gradient, num_stages)
            inputs = tuple(b - w for b, w in zip(backward, given, strict=True))
        else:
            inputs = tuple(cost / 2 for cost in backward)
        if self.weight_gradient is not None:
            weights = _numbers("weight_gradient", self.weight_gradient, num_stages)
        else:
            weights = tuple(b - i for b, i in zip(backward, inputs, strict=True))
        for name, costs in (("input_gradient", inputs), ("weight_gradient", weights)):
            if min(costs) <= 0:
                raise ValueError(
                    f"`{name}` must be positive, what is left of `backward` is {min(costs)}; give "
                    f"both halves."
                )
        transfer = _numbers("transfer", self.transfer, num_stages - 1, per="pair of stages")
        return StageCosts(
            {
                "forward": forward,
                "backward": backward,
                "input_gradient": inputs,
                "weight_gradient": weights,
            },
            transfer,
        )


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs by kind and stage, and the transfer time by pair of stages (s, s + 1)."""

    actions: dict[Kind, tuple[float, ...]]
    transfer: tuple[float, ...]

    def transfer_between(self, stage: int, other: int) -> float:
        """Return the time of a message between two neighbouring stages on different ranks."""
        return self.transfer[min(stage, other)]


def _numbers(name: str, given: Cost, count: int, per: str = "stage") -> tuple[float, ...]:
    costs = tuple(given) if isinstance(given, Sequence) else (given,) * count
    if not all(isinstance(cost, Real) for cost in costs):
        raise TypeError(f"`{name}` must be a number or a list of numbers, got {given!r}.")
    if len(costs) != count:
        raise ValueError(
            f"`{name}` must be one number or one per {per} ({count}), got {len(costs)}."
        )
    checked = costs if isinstance(given, Sequence) else (given,)
    for cost in checked:
        if per == "stage" and not (cost > 0 and math.isfinite(cost)):
            raise ValueError(f"`{name}` must be positive and finite, got {cost}.")
        if not (cost >= 0 and math.isfinite(cost)):
            raise ValueError(f"`{name}` must be finite and not below 0, got {cost}.")
        if cost > _LARGEST:
            raise ValueError(f"`{name}` must be at most {_LARGEST}, got {cost}.")
    return costs
