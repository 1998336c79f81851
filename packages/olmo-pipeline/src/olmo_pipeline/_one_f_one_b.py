"""One forward, one backward (1F1B), plain and interleaved.

Every rank warms up with some forwards, then alternates one forward with one backward, then drains.
The number of warm-up forwards is the only difference between ranks; it is what a later stage needs
to get its first microbatch back. For P ranks, m microbatches and v chunks a rank, at equal stage
costs:

    schedule      stage s on rank   warm-up forwards of rank r   idle share of the time
    plain         s                 P - 1 - r                    (P - 1) / (m + P - 1)
    interleaved   s % P             2 (P - 1 - r) + (v - 1) P    (P - 1) / (v m + P - 1)

Interleaving makes each rank work on v thinner stages, so that the pipeline fills v times sooner; it
sends v times as many messages and keeps more activations. Its idle share is that above when P
divides m.

Sources: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", 2021, section 2.2; Megatron-LM, `megatron/core/pipeline_parallel/schedules.py`.
"""

from ._placement import at_least_one
from ._schedule import Action, Schedule


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build plain 1F1B: one stage a rank.

    Rank r never holds more than `min(num_ranks - r, num_microbatches)` microbatches.

    Args:
        num_ranks: Ranks P, at least 1; also the number of stages.
        num_microbatches: Microbatches m, at least 1; fewer than P is allowed.

    Returns:
        A schedule that validates under eager and blocking sends.

    Raises:
        ValueError: If an argument is below 1.
    """
    at_least_one(num_ranks=num_ranks, num_microbatches=num_microbatches)
    actions = []
    for rank in range(num_ranks):
        forwards = [Action("forward", rank, index) for index in range(num_microbatches)]
        backwards = [Action("backward", rank, index) for index in range(num_microbatches)]
        actions.append(_alternate(forwards, backwards, warm_up=num_ranks - 1 - rank))
    return Schedule(
        num_ranks=num_ranks,
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        actions=tuple(actions),
        rank_of_stage=tuple(range(num_ranks)),
        name="one_f_one_b",
    )


def interleaved_one_f_one_b(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Build interleaved 1F1B: `num_chunks` stages a rank, stage s on rank `s % num_ranks`.

    The order is Megatron's: microbatches go in rounds of P, each round visits the chunks in order
    forward and in reverse order backward. When P does not divide m, the order is that of the next
    multiple of P without the microbatches that do not exist. Leaving out a whole microbatch keeps
    an order legal, since microbatches never wait for each other; a shorter last round by the same
    warm-up counts would deadlock (4 ranks, 5 microbatches, 3 chunks).

    Args:
        num_ranks: Ranks P, at least 1.
        num_microbatches: Microbatches m, at least 1; any number, but the idle share is
            `(P - 1) / (num_chunks m + P - 1)` only when P divides m.
        num_chunks: Stages a rank, at least 1. With 1 this is `one_f_one_b`.

    Returns:
        A schedule of `num_ranks * num_chunks` stages that validates under eager sends.

    Raises:
        ValueError: If an argument is below 1.
    """
    at_least_one(num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    if num_chunks == 1:
        return one_f_one_b(num_ranks, num_microbatches)
    num_rounds = -(-num_microbatches // num_ranks)
    forward_order = _visits(num_ranks, num_rounds, range(num_chunks))
    backward_order = _visits(num_ranks, num_rounds, range(num_chunks)[::-1])
    actions = []
    for rank in range(num_ranks):
        forwards = [Action("forward", c * num_ranks + rank, index) for c, index in forward_order]
        backwards = [Action("backward", c * num_ranks + rank, index) for c, index in backward_order]
        warm_up = 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks
        row = _alternate(forwards, backwards, warm_up)
        actions.append(tuple(action for action in row if action.microbatch < num_microbatches))
    num_stages = num_ranks * num_chunks
    return Schedule(
        num_ranks=num_ranks,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        actions=tuple(actions),
        rank_of_stage=tuple(stage % num_ranks for stage in range(num_stages)),
        name=f"interleaved_one_f_one_b, {num_chunks} chunks",
    )


def _visits(num_ranks: int, num_rounds: int, chunks: range) -> list[tuple[int, int]]:
    """Return (chunk, microbatch) in the order of one rank: round, then chunk, then microbatch."""
    return [
        (chunk, index * num_ranks + offset)
        for index in range(num_rounds)
        for chunk in chunks
        for offset in range(num_ranks)
    ]


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """Return `warm_up` forwards, then forward and backward in turn, then the backwards left."""
    warm_up = min(warm_up, len(forwards))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return tuple(order + backwards[len(forwards) - warm_up :])
