"""Zero-bubble schedules: the backward is split, and weight gradients fill the idle time.

Only the input gradient of a stage holds up the stage before it; its weight gradient can be computed
whenever the rank has nothing else to do. With costs F forward, I input gradient, W weight gradient:

    kind   stages a rank   published idle time        live activations a rank
    h1     1               (P - 1) (F + I - W)        min(P, m)
    v      2, on the V     0 when F = I = W           2 P (each of half a rank's layers)

`h1` keeps no more than rank 0 of 1F1B, on every rank; `v` gives every rank an early and a late
stage. Both orders come from the greedy walk of `_list_scheduler` with that many activations and due
times that were found once, by a random search over small numbers: weight gradients are due so late
that they only fill gaps or make room, and forwards spread out more than input gradients.

At equal costs the makespan is the work of a rank and P - 1 units (m >= P for `h1`, m >= 2 P for
`v`), which is least: the last rank cannot begin before P - 1. The published 0 of `v` leaves out
that stagger of the ranks, which costs nothing where the next step may begin staggered too.

Source: P. Qi, X. Wan, G. Huang, M. Lin, "Zero Bubble Pipeline Parallelism", 2023
(arXiv 2401.10241), sections 2.1 (H1) and 6 (ZB-V).
"""

from typing import Literal

from ._costs import Costs
from ._due_times import Pattern, due_times
from ._list_scheduler import Problem, Walk, as_schedule
from ._placement import at_least_one, place_stages
from ._schedule import Schedule

# Weight gradients are due after all else. The first pattern that is best is taken.
LATE = 1e6
H1 = (Pattern(steps=(2.0, 1.0), turns=(2.0,), weight_delay=LATE),)
V = (
    Pattern(steps=(1.0, 3.0, 1.0, 1.0), turns=(1.0, 1.0, 2.0), weight_delay=LATE),
    Pattern(steps=(4.0, 4.0, 1.5, 0.5), turns=(4.0, 2.5, 2.0), weight_delay=LATE),
)


def zero_bubble(num_ranks: int, num_microbatches: int, kind: Literal["h1", "v"] = "h1") -> Schedule:
    """Build ZB-H1 or ZB-V.

    Args:
        num_ranks: Ranks P, at least 1.
        num_microbatches: Microbatches m, at least 1.
        kind: `"h1"`: one stage a rank; `"v"`: two, stage s on rank `min(s, 2 P - 1 - s)`.

    Returns:
        A schedule with every backward split. `h1` validates under eager and blocking sends, `v`
        under eager sends.

    Raises:
        ValueError: If a number is below 1 or `kind` is another word.
    """
    at_least_one(num_ranks=num_ranks, num_microbatches=num_microbatches)
    if kind not in ("h1", "v"):
        raise ValueError(f'`kind` must be "h1" or "v", got {kind!r}.')
    num_chunks = 1 if kind == "h1" else 2
    problem = Problem(
        rank_of_stage=place_stages(num_ranks, num_chunks, "v"),
        num_microbatches=num_microbatches,
        costs=Costs(),
        max_live=(num_chunks * num_ranks,) * num_ranks,
        splits_backward=True,
    )
    patterns = H1 if kind == "h1" else V
    walks = [Walk(problem, due_times(problem, pattern)) for pattern in patterns]
    best = min(walks, key=Walk.run)
    return as_schedule(problem, best.rows, f"zero_bubble, {kind}")
