"""Cut a stack of layers into consecutive stages so that the slowest stage is as fast as possible.

A pipeline runs at the pace of its slowest stage. The first stage also pays for the embedding and
the last one for the head and the loss, so equal layer counts are seldom best. With `c` the cost of
a layer,

    minimise  max over stages s of  ( sum of c over the layers of s  + extra of s )

over all cuts that leave each stage at least one layer. Solved exactly by dynamic programming, in
O(num_stages * num_layers^2).
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

CostOf = Callable[[int, int, int], float]  # stage, first layer, layer after the last


def split_layers(
    num_layers: int,
    num_stages: int,
    *,
    first_extra: float = 0.0,
    last_extra: float = 0.0,
    costs: Sequence[float] | None = None,
) -> tuple[range, ...]:
    """Return the layers of each stage.

    Of all cuts with the least maximum the most even one is taken (least sum of squared stage
    costs), and of those the one whose early stages have fewer layers: they keep more microbatches
    alive.

    Args:
        num_layers: Layers L.
        num_stages: Stages, in [1, L].
        first_extra: Cost of what the first stage does besides its layers (embedding), in the
            unit of `costs`.
        last_extra: Cost of what the last stage does besides its layers (head and loss), likewise.
        costs: Cost of each layer, L numbers not below 0, measured or given; all 1 when None.

    Returns:
        One non-empty range per stage; together they are `range(num_layers)`.

    Raises:
        ValueError: If there are fewer layers than stages, `costs` has another length, or a cost is
            negative or not finite.
    """
    if num_stages < 1:
        raise ValueError(f"`num_stages` must be at least 1, got {num_stages}.")
    if num_layers < num_stages:
        raise ValueError(
            f"each stage must get a layer: `num_layers` must be at least "
            f"`num_stages`={num_stages}, got {num_layers}."
        )
    costs = [1.0] * num_layers if costs is None else costs
    if len(costs) != num_layers:
        raise ValueError(
            f"`costs` must hold {num_layers} numbers, one per layer, got {len(costs)}."
        )
    given = {"first_extra": [first_extra], "last_extra": [last_extra], "costs": costs}
    for name, values in given.items():
        for value in values:
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"`{name}` must be finite and not below 0, got {value}.")
    sums = [0.0, *accumulate(costs)]

    def cost_of(stage: int, start: int, stop: int) -> float:
        extra = first_extra if stage == 0 else 0.0
        extra += last_extra if stage == num_stages - 1 else 0.0
        return sums[stop] - sums[start] + extra

    slowest = _least_maximum(num_layers, num_stages, cost_of)
    ends = _most_even(num_layers, num_stages, cost_of, slowest)
    return tuple(range(start, stop) for start, stop in zip([0, *ends[:-1]], ends, strict=True))


def _least_maximum(num_layers: int, num_stages: int, cost_of: CostOf) -> float:
    best = [0.0] + [math.inf] * num_layers  # by number of layers in the stages so far
    for stage in range(num_stages):
        best = [
            min((max(best[k], cost_of(stage, k, n)) for k in range(n)), default=math.inf)
            for n in range(num_layers + 1)
        ]
    return best[num_layers]


def _most_even(num_layers: int, num_stages: int, cost_of: CostOf, limit: float) -> tuple[int, ...]:
    """Return where the stages end: least sum of squares, none above `limit`, early ends first."""
    worst = (math.inf, ())
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] + [worst] * num_layers
    for stage in range(num_stages):
        best = [
            min(
                (
                    (best[k][0] + cost_of(stage, k, n) ** 2, (*best[k][1], n))
                    for k in range(n)
                    if best[k] is not worst and cost_of(stage, k, n) <= limit
                ),
                default=worst,
            )
            for n in range(num_layers + 1)
        ]
    return best[num_layers][1]
