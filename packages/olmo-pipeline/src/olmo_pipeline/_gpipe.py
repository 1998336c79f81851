"""GPipe: all forwards, then all backwards.

Stage s lies on rank s. Every rank keeps the activations of all m microbatches; at equal stage costs
the idle share is that of 1F1B, `(P - 1) / (m + P - 1)`, so there is no reason to run it, but it is
the simplest schedule to compare others with.

Source: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism", 2019, section 2.3 and figure 2c.
"""

from ._placement import at_least_one
from ._schedule import Action, Schedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build GPipe: one stage a rank, backwards in the order of the forwards.

    Args:
        num_ranks: Ranks P, at least 1; also the number of stages.
        num_microbatches: Microbatches m, at least 1.

    Returns:
        A schedule that validates under eager and blocking sends; each rank keeps m activations.

    Raises:
        ValueError: If an argument is below 1.
    """
    at_least_one(num_ranks=num_ranks, num_microbatches=num_microbatches)
    return Schedule(
        num_ranks=num_ranks,
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        actions=tuple(
            tuple(
                Action(kind, rank, index)
                for kind in ("forward", "backward")
                for index in range(num_microbatches)
            )
            for rank in range(num_ranks)
        ),
        rank_of_stage=tuple(range(num_ranks)),
        name="gpipe",
    )
