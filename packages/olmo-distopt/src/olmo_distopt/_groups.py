"""Which processes hold a copy of a parameter.

A replica group is the set of processes that hold the same parameter and must therefore agree on its
gradient and its value. With `D` data-parallel processes of which `M` share out the experts, a dense
weight has `D` replicas and an expert weight `D / M`. The group is a property of the parameter, not
of the wrapper that holds it, so it is asked for by name.

Collectives of several groups must start in one order on every process, or two processes wait for
each other. That order is the groups' names, sorted: the same everywhere, whichever groups a process
belongs to and in whichever order it was told of them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """The processes that hold copies of the same parameters, seen from one of them.

    Attributes:
        name: its name, the same on every process.
        process_group: its process group; None when this process alone holds the parameters.
        size: number of processes.
        rank: this process's place among them, in [0, size); -1 when it is not one of them.
    """

    name: str
    process_group: ProcessGroup | None
    size: int
    rank: int

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the (small, picklable) `value` of every process of the group, in rank order."""
        if self.size == 1:
            return [value]
        # As `all_gather_object` does, which needs numpy; torch does not bring it.
        mine = torch.tensor(list(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [int(each) for each in self._gather(torch.tensor([len(mine)]))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(mine)] = mine
        given = zip(self._gather(padded), lengths, strict=True)
        return [pickle.loads(bytes(each[:length].tolist())) for each, length in given]

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return every process's CPU tensor, through the GPU where the group has NCCL alone."""
        if "cpu:" not in dist.get_backend_config(self.process_group):
            mine = mine.to(torch.device("cuda", torch.cuda.current_device()))
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine, group=self.process_group)
        return [each.cpu() for each in every]


class ReplicaGroups:
    """Names the replica group of every parameter.

    Args:
        groups: process group by name. None: this process alone holds the parameters of the group;
            `dist.group.WORLD` is None as long as torch.distributed is not initialised.
            Every process uses the same names; the members behind a name differ from process to
            process (each expert-parallel rank has its own expert replicas).
        assign: `(global name, parameter) -> group name`. Must give a parameter the same answer on
            every process. A weight tied across pipeline stages belongs to a group that spans them.

    Raises:
        TypeError: `groups` is no mapping to process groups, or `assign` no function.

    Example:
        ```python
        ReplicaGroups(
            {"dense": data_group, "expert": expert_group},
            lambda name, parameter: "expert" if ".experts." in name else "dense",
        )
        ```
    """

    def __init__(
        self,
        groups: Mapping[str, ProcessGroup | None],
        assign: Callable[[str, nn.Parameter], str],
    ) -> None:
        if not isinstance(groups, Mapping):
            raise TypeError(
                f"`groups` must be a mapping from names to process groups, got {groups!r}."
            )
        if not callable(assign):
            raise TypeError(
                "`assign` must be a function of (name, parameter) that returns the name of a "
                f"group, got {assign!r}."
            )
        self._groups = {name: _describe(name, groups[name]) for name in sorted(groups)}
        self._assign = assign

    def of(self, name: str, parameter: nn.Parameter) -> ReplicaGroup:
        """Return the replica group of one parameter.

        Raises:
            ValueError: the parameter is assigned to an unknown group, or to one that this process
                does not belong to.
        """
        group_name = self._assign(name, parameter)
        group = self._groups.get(group_name)
        if group is None:
            known = ", ".join(f"`{known}`" for known in self._groups) or "none"
            raise ValueError(
                f"Parameter `{name}` is assigned to the replica group `{group_name}`, which must "
                f"be one of the known groups: {known}."
            )
        if group.rank < 0:
            raise ValueError(
                f"Parameter `{name}` is assigned to the replica group `{group_name}`, but this "
                "process is not a member of it; pass the group that this process belongs to."
            )
        return group

    def are_all_none(self) -> bool:
        """Return whether no process group was given at all, not even one of this process alone."""
        return all(
            group.process_group is None and group.rank == 0 for group in self._groups.values()
        )

    def shared(self) -> list[ReplicaGroup]:
        """Return the groups of two or more processes that this one is a member of, by name."""
        return [group for group in self._groups.values() if group.rank >= 0 and group.size > 1]


def _describe(name: str, process_group: ProcessGroup | None) -> ReplicaGroup:
    if process_group is None:
        return ReplicaGroup(name, None, size=1, rank=0)
    is_group = isinstance(process_group, dist.ProcessGroup)
    if not is_group and process_group != dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            f"The replica group `{name}` must be a process group, or None, got {process_group!r}; "
            "make one with `torch.distributed.new_group(ranks)`, take a dimension of a device mesh "
            "with `mesh.get_group(dimension)`."
        )
    rank = dist.get_rank(process_group)
    size = dist.get_world_size(process_group) if rank >= 0 else 0
    return ReplicaGroup(name, process_group, size, rank)
