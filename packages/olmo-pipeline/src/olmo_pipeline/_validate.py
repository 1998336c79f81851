"""Prove that a schedule can run: each action once, in place and order, without deadlock.

Two ways of sending are checked, because a schedule can be right under one and hang under the other.

`"eager"` is what `PipelineExecutor` does. A send is posted and the rank goes on; each ordered pair
of ranks has its own channel, and the receiver posts its receives in the order of the sender's
sends. No message can then stand in the way of another one, so the schedule deadlocks only if the
actions wait for each other in a circle.

`"blocking"` is a runtime without room for messages under way (a rendezvous). After an action a rank
offers its output and asks for the input of its next action, both at once (`batch_isend_irecv`), and
goes on only when both have been exchanged. Plain 1F1B passes. An interleaved schedule can fail: a
rank offers an activation that its neighbour uses only after several other actions.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from ._placement import is_whole
from ._schedule import Action, Schedule, needs_of, results_of, source_of


def validate(
    schedule: Schedule,
    *,
    sends: Literal["eager", "blocking"] = "eager",
    max_live: int | Sequence[int] | None = None,
) -> None:
    """Raise unless every rank can perform its actions to the end.

    Args:
        schedule: Any schedule, from a builder or from hand-written text.
        sends: How a runtime sends; see the module's text. `"eager"` is the executor's way.
        max_live: The most activations that a rank may keep at once, one number or one per rank: the
            forwards of its chunks whose backward (the weight gradient, where it is split) has not
            ended. None for any number.

    Raises:
        ValueError: If an action is unknown, stands on a rank that does not hold its stage, appears
            twice, is missing, or stands before one of the same rank that it needs; if a rank keeps
            more than `max_live`; or if the ranks wait for each other. The message names rank and
            action.
    """
    if sends not in ("eager", "blocking"):
        raise ValueError(f'`sends` must be "eager" or "blocking", got {sends!r}.')
    _check_places(schedule)
    _check_order(schedule)
    if max_live is not None:
        _check_live(schedule, per_rank("max_live", max_live, schedule.num_ranks))
    for _ in replay(schedule):
        pass
    if sends == "blocking":
        _check_rendezvous(schedule)


def per_rank(name: str, given: int | Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Return one number per rank.

    Raises:
        ValueError: If a sequence has another length than `num_ranks`.
        TypeError: If what is given is not made of whole numbers.
    """
    numbers = tuple(given) if isinstance(given, Sequence) else (given,) * num_ranks
    if not all(map(is_whole, numbers)):
        raise TypeError(f"`{name}` must be a whole number or a list of them, got {given!r}.")
    if len(numbers) != num_ranks:
        raise ValueError(
            f"`{name}` must be one number or one per rank ({num_ranks}), got {len(numbers)}."
        )
    return numbers


def replay(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) in an order in which every action's needs come before it.

    Raises:
        ValueError: If no rank can go on although actions are left.
    """
    done: set[Action] = set()
    positions = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                if any(need not in done for need in needs_of(action, schedule.num_stages)):
                    break
                done.update(results_of(action))
                positions[rank] += 1
                moved = True
                yield rank, action
    waits = []
    for rank, position in enumerate(positions):
        if position < len(schedule.actions[rank]):
            action = schedule.actions[rank][position]
            missing = [n for n in needs_of(action, schedule.num_stages) if n not in done]
            waits.append(f"rank {rank} waits at {action} for {missing[0]}")
    if waits:
        raise ValueError(f"the schedule deadlocks: {'; '.join(waits)}.")


def _check_places(schedule: Schedule) -> None:
    seen: set[Action] = set()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.stage >= schedule.num_stages:
                raise ValueError(
                    f"rank {rank}: {action} names stage {action.stage} of {schedule.num_stages}."
                )
            if action.microbatch >= schedule.num_microbatches:
                raise ValueError(
                    f"rank {rank}: {action} names microbatch {action.microbatch} of "
                    f"{schedule.num_microbatches}."
                )
            holder = schedule.rank_of_stage[action.stage]
            if holder != rank:
                raise ValueError(
                    f"rank {rank}: {action} must stand on rank {holder}, which holds stage "
                    f"{action.stage}."
                )
            if action in seen:
                raise ValueError(f"rank {rank}: {action} must stand there once, got it twice.")
            seen.add(action)
    for stage, rank in enumerate(schedule.rank_of_stage):
        for microbatch in range(schedule.num_microbatches):
            _check_complete(rank, stage, microbatch, seen)


def _check_complete(rank: int, stage: int, microbatch: int, seen: set[Action]) -> None:
    forward = Action("forward", stage, microbatch)
    whole = Action("backward", stage, microbatch)
    halves = (
        Action("input_gradient", stage, microbatch),
        Action("weight_gradient", stage, microbatch),
    )
    if forward not in seen:
        raise ValueError(f"rank {rank}: {forward} is missing.")
    split = [half for half in halves if half in seen]
    if whole in seen and split:
        raise ValueError(f"rank {rank}: {whole} is whole, {split[0]} must not stand beside it.")
    if whole not in seen:
        for action in halves if split else (whole,):
            if action not in seen:
                raise ValueError(f"rank {rank}: {action} is missing.")


def _check_order(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        before: set[Action] = set()
        for action in actions:
            for need in needs_of(action, schedule.num_stages):
                if schedule.rank_of_stage[need.stage] == rank and need not in before:
                    raise ValueError(f"rank {rank}: {action} stands before {need}, which it needs.")
            before.update(results_of(action))


def _check_live(schedule: Schedule, max_live: Sequence[int]) -> None:
    for rank, actions in enumerate(schedule.actions):
        for action, live in zip(actions, live_after(actions), strict=True):
            if live > max_live[rank]:
                raise ValueError(
                    f"rank {rank}: {action} makes {live} live activations, `max_live` is "
                    f"{max_live[rank]}."
                )


def live_after(actions: Sequence[Action]) -> Iterator[int]:
    """Yield, for each action of a rank, how many activations it keeps once that has ended.

    An activation is live from its forward to its backward, or to its weight gradient where the
    backward is split: the weight gradients of linear layers need the layers' inputs.
    """
    live = 0
    for action in actions:
        if action.kind == "forward":
            live += 1
        elif action.kind != "input_gradient":
            live -= 1
        yield live


def _check_rendezvous(schedule: Schedule) -> None:
    """Replay with messages that pass only when the receiver's next action takes them."""
    positions = [0] * schedule.num_ranks
    offered: dict[Action, int] = {}  # who takes a message that still waits -> the rank offering it
    taken: set[Action] = set()  # consumers whose message has arrived
    consumers = {source_of(a, schedule.num_stages): a for row in schedule.actions for a in row}
    consumers.pop(None, None)

    def next_action(rank: int) -> Action | None:
        row = schedule.actions[rank]
        return row[positions[rank]] if positions[rank] < len(row) else None

    moved = True
    while moved:
        moved = False
        for rank in range(schedule.num_ranks):
            action = next_action(rank)
            if action is None:
                continue
            source = source_of(action, schedule.num_stages)
            remote = source is not None and schedule.rank_of_stage[source.stage] != rank
            if remote and action in offered:
                del offered[action]
                taken.add(action)
                moved = True
            if rank in offered.values() or (remote and action not in taken):
                continue
            positions[rank] += 1
            moved = True
            consumer = next((consumers[r] for r in results_of(action) if r in consumers), None)
            if consumer is not None and schedule.rank_of_stage[consumer.stage] != rank:
                offered[consumer] = rank
    stuck = [
        f"rank {rank} waits to send for {consumer}, "
        f"rank {schedule.rank_of_stage[consumer.stage]} is at "
        f"{next_action(schedule.rank_of_stage[consumer.stage])}"
        for consumer, rank in sorted(offered.items(), key=lambda item: item[1])
    ]
    if stuck:
        raise ValueError(f"the schedule deadlocks under blocking sends: {'; '.join(stuck)}.")
