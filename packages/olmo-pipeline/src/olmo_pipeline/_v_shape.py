"""1F1B-V: two chunks a rank on the V, whole backward, every rank keeps the same few activations.

Rank r holds stages r and 2 P - 1 - r, so that one long-lived and one short-lived activation meet on
every rank (see `_placement`). The order comes from the greedy walk of `_list_scheduler` with due
times that were found once and fit every size: microbatches 4 units apart (a rank does 2 forwards
and 2 backwards a microbatch, one unit each), forwards 1 unit apart along the chain, the backward of
the second chunk 3, that of the first 2, and no forward more than 2 units before it is due.

At equal costs of forward and backward and m >= 2 microbatches a rank idles for 4 P - 6 units (one
more when P is odd and 2 m > P + 1), with P + 2 activations at once: an idle share of 23.8 % for
P = 4, m = 8 and 6 activations. That much is the least possible there (proved by a solver). The
loop, `interleaved_one_f_one_b` with two chunks, idles 2 P - 2 units and keeps up to 3 P - 1.
`search` trades one for the other. Where a backward costs twice the forward this order stalls again
and again (36.8 % for P = 4, m = 8); `search` finds one for those costs under the same cap (23.8 %).
"""

from ._costs import Costs
from ._due_times import Pattern, due_times
from ._list_scheduler import Problem, Walk, as_schedule
from ._placement import at_least_one, place_stages
from ._schedule import Schedule

PATTERN = Pattern(steps=(1.0, 1.0, 3.0, 2.0), turns=(1.0, 1.0, 1.0), slack=2.0)


def v_shape(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build 1F1B-V.

    Args:
        num_ranks: Ranks P, at least 1; there are 2 P stages, stage s on rank `min(s, 2 P - 1 - s)`.
        num_microbatches: Microbatches m, at least 1.

    Returns:
        A schedule that validates under eager sends and keeps at most `P + 2` activations a rank.

    Raises:
        ValueError: If an argument is below 1.
    """
    at_least_one(num_ranks=num_ranks, num_microbatches=num_microbatches)
    problem = Problem(
        rank_of_stage=place_stages(num_ranks, 2, "v"),
        num_microbatches=num_microbatches,
        costs=Costs(forward=1.0, backward=1.0),
        max_live=(num_ranks + 2,) * num_ranks,
        splits_backward=False,
    )
    walk = Walk(problem, due_times(problem, PATTERN))
    walk.run()
    return as_schedule(problem, walk.rows, "v_shape")
