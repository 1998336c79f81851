"""What the members of a replica group must have in common, found out before they work together.

A process that would reduce other tensors than its peers, or cut them elsewhere, hangs or spoils the
sums of all of them, and one that raises alone leaves the others waiting. So what is made over
groups is first checked on each process without communication, and then all members of every group
hear, in a few small collectives, whether one of them was refused or is unlike the others: either
all go on or all raise.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ._checksum import checksum
from ._collective import is_together
from ._groups import ReplicaGroup, ReplicaGroups

T = TypeVar("T")

_NAMES_SHOWN = 5


def agree(
    replica_groups: ReplicaGroups,
    check: Callable[[], list[T]],
    describe: Callable[[T], tuple[ReplicaGroup, object]],
    options: Mapping[str, object],
) -> list[T]:
    """Return what `check` returns, or raise on all members of the groups.

    Collective over every group of two or more that this process is a member of, also one whose
    parameters it lacks. What a process is refused for is told over its groups, and from those heard
    over theirs; one that shares none with any of them does not hear of it.

    Args:
        replica_groups: the groups.
        check: makes a list of what will be reduced, or updated, in order; raises for bad input.
        describe: `(group, what all members must say of it)` of an item of the list.
        options: what must be the same on all members besides, by name.

    Raises:
        TypeError: `replica_groups` is no `ReplicaGroups`.
        Exception: what `check` or `describe` raises, on this process.
        ValueError: they raised on a member of a group, or members differ.
    """
    if not isinstance(replica_groups, ReplicaGroups):
        raise TypeError(
            "`replica_groups` must be a `ReplicaGroups`, got a "
            f"{type(replica_groups).__name__}; in one process: "
            '`ReplicaGroups({"all": None}, lambda name, parameter: "all")`.'
        )
    items: list[T] = []
    held: dict[str, list[object]] = {}
    refusal: Exception | None = None
    try:
        items = check()
        for item in items:
            group, description = describe(item)
            held.setdefault(group.name, []).append(description)
    except Exception as error:
        refusal = error
    _warn_of_no_replicas(replica_groups)
    heard = "" if refusal is None else f"{type(refusal).__name__}: {refusal}"
    shared = replica_groups.shared()
    said = {name: repr(value) for name, value in options.items()}
    for group in shared:
        mine = held.get(group.name, [])
        digest = hashlib.sha256(repr(mine).encode()).digest()
        given = group.gather_objects((heard, group.name, said, digest))
        heard = heard or _difference(group, given, len(mine))
    for group in shared:  # again, for members who have since heard of it in a later group
        rumours = group.gather_objects(heard)
        heard = heard or next((rumour for rumour in rumours if rumour), "")
    if refusal is not None:
        raise refusal
    if heard:
        raise ValueError(heard)
    return items


def _warn_of_no_replicas(replica_groups: ReplicaGroups) -> None:
    """Warn where processes work side by side and none is told of another."""
    num_processes = dist.get_world_size() if is_together() else 1
    if num_processes > 1 and replica_groups.are_all_none():
        warnings.warn(
            f"torch.distributed joins {num_processes} processes, but every replica group is None, "
            "so that no gradient is summed over any of them. Give the process groups of the "
            "replicas, such as `torch.distributed.group.WORLD`, which is None before "
            "`init_process_group`. Where no two processes hold the same parameter, ignore this.",
            stacklevel=4,  # where a reducer is built; of an optimizer, its constructor
        )


def _difference(
    group: ReplicaGroup, given: Sequence[tuple[str, str, dict[str, str], bytes]], num_held: int
) -> str:
    """Say what members disagree in, or return an empty string."""
    for rank, (heard, *_) in enumerate(given):
        if heard:
            return f"Member {rank} of the replica group `{group.name}` was refused: {heard}"
    names = {name for _, name, _, _ in given}
    if len(names) > 1:
        return f"All members of a replica group must give it the same name, got {sorted(names)}."
    first = given[0][2]
    for rank, (_, _, said, _) in enumerate(given):
        for option in [*first, *said]:
            one, other = first.get(option, "not given"), said.get(option, "not given")
            if one != other:
                return (
                    f"`{option}` must be the same on all members of the replica group "
                    f"`{group.name}`, got {one} on member 0 and {other} on member {rank}."
                )
    different = [rank for rank, each in enumerate(given) if each[3] != given[0][3]]
    if not different:
        return ""
    return (
        f"All {group.size} members of the replica group `{group.name}` must list the same "
        "parameters (name, shape, dtype, and what the rules of an optimizer say of them) in the "
        f"same order, but members {different} differ from member 0. Member {group.rank}, this "
        f"process, lists {num_held} parameters."
    )


def require_equal_values(
    replica_groups: ReplicaGroups, parameters: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Raise on every member of a group whose members hold different values of a parameter.

    Compares an exact checksum of each parameter's bits. One small collective for each group of two
    or more that holds a parameter here; one read from the device for each.

    Args:
        replica_groups: the groups.
        parameters: `(global name, parameter)`, contiguous, of which `agree` is sure.

    Raises:
        ValueError: the bits of a parameter are not the same on all of its replicas.
    """
    held: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters:
        held.setdefault(replica_groups.of(name, parameter).name, []).append((name, parameter))
    # Every group is asked before any raises: the members of a sound one do not wait in vain.
    groups = [group for group in replica_groups.shared() if group.name in held]
    differing = [(group, _differing(group, held[group.name])) for group in groups]
    for group, names in differing:
        if names:
            shown = ", ".join(f"`{name}`" for name in names[:_NAMES_SHOWN])
            more = len(names) - _NAMES_SHOWN
            raise ValueError(
                f"All {group.size} members of the replica group `{group.name}` must hold the same "
                f"values, but they differ in {len(names)} of {len(held[group.name])} parameters: "
                f"{shown}" + (f" and {more} more. " if more > 0 else ". ") + "Initialise the "
                "replicas from the same seed, or broadcast the parameters from one member to the "
                "others first."
            )


def _differing(group: ReplicaGroup, parameters: Sequence[tuple[str, nn.Parameter]]) -> list[str]:
    """Return the names of the parameters whose bits are not the same on every member.

    One all-reduce of two integers a parameter, and one read from the device.
    """
    device = parameters[0][1].device
    sums = torch.stack([checksum(parameter).to(device) for _, parameter in parameters])
    # The largest of ~x is ~ of the smallest x: both ends by one maximum.
    ends = torch.stack([sums, ~sums])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group.process_group)
    differs = (ends[0] != ~ends[1]).tolist()
    return [name for (name, _), apart in zip(parameters, differs, strict=True) if apart]
