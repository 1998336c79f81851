"""Which tensors travel between ranks, in which order: derived from the lists of actions.

Every rank knows the whole schedule, so sender and receiver agree about every message without a
header: on the channel from rank a to rank b, messages go in the order in which rank a produces
them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ._schedule import Action, results_of, source_of

Rows = Sequence[Sequence[Action]]  # the actions of each rank


class Message(NamedTuple):
    """One activation (to the next stage) or gradient (to the one before) between two ranks."""

    source: int  # rank
    destination: int  # rank
    sent_at: int  # position, in the source's actions, of the one that produces the tensor
    used_at: int  # position, in the destination's actions, of the one that takes it in
    microbatch: int


def list_messages(rows: Rows, rank_of_stage: Sequence[int]) -> list[Message]:
    """Return all messages; those of one source stand in the order in which it sends them."""
    positions = {
        result: position
        for row in rows
        for position, action in enumerate(row)
        for result in results_of(action)
    }
    messages = []
    for destination, row in enumerate(rows):
        for used_at, action in enumerate(row):
            made_by = source_of(action, len(rank_of_stage))
            if made_by is None or rank_of_stage[made_by.stage] == destination:
                continue
            source = rank_of_stage[made_by.stage]
            sent_at = positions[made_by]
            messages.append(Message(source, destination, sent_at, used_at, action.microbatch))
    return sorted(messages)


def list_channels(rank_of_stage: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ordered pairs of ranks between which messages pass, sorted."""
    pairs = set(pairwise(rank_of_stage))
    return sorted({(a, b) for pair in pairs for a, b in (pair, pair[::-1]) if a != b})


def forward_rows(
    rank_of_stage: Sequence[int], num_ranks: int, microbatches: Sequence[int]
) -> list[list[Action]]:
    """Return the actions of a pass without backward.

    Each rank visits its stages in ascending order, each with all microbatches. The order (stage,
    microbatch) is the same on all ranks, so no rank waits in a circle.
    """
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    for stage, rank in enumerate(rank_of_stage):
        rows[rank] += [Action("forward", stage, microbatch) for microbatch in microbatches]
    return rows
