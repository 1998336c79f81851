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

import hashlib
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ._checksum import checksum

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NAMES_SHOWN = 5


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

    def differing(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> list[str]:
        """Return the names of the parameters whose bits are not the same on every process.

        One all-reduce of two integers a parameter, and one read from the device.

        Args:
            parameters: the same names, shapes and dtypes on every process of the group.
        """
        if self.size == 1 or not parameters:
            return []
        device = parameters[0][1].device
        sums = torch.stack([checksum(parameter).to(device) for _, parameter in parameters])
        # The largest of ~x is ~ of the smallest x: both ends by one maximum.
        ends = torch.stack([sums, ~sums])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.process_group)
        differs = (ends[0] != ~ends[1]).tolist()
        return [name for (name, _), apart in zip(parameters, differs, strict=True) if apart]


class ReplicaGroups:
    """Names the replica group of every parameter.

    Args:
        groups: process group by name. None: this process alone holds the parameters of the group.
            Every process uses the same names; the members behind a name differ from process to
            process (each expert-parallel rank has its own expert replicas).
        assign: `(global name, parameter) -> group name`. Must give a parameter the same answer on
            every process. A weight tied across pipeline stages belongs to a group that spans them.

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

    def require_agreement(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Raise on every member when the members of a group do not hold the same parameters.

        One small collective for each group of two or more, also for a group whose parameters this
        process lacks: a difference then raises here and does not hang in the first reduction.

        Args:
            parameters: `(global name, parameter)` in the order in which they will be reduced.

        Raises:
            ValueError: names, shapes, dtypes or their order differ.
        """
        held: dict[str, list[tuple[str, Sequence[int], str]]] = {name: [] for name in self._groups}
        for name, parameter in parameters:
            description = (name, tuple(parameter.shape), str(parameter.dtype))
            held[self.of(name, parameter).name].append(description)
        for group in self._groups.values():
            if group.rank < 0:
                continue
            mine = hashlib.sha256(repr(held[group.name]).encode()).digest()
            digests = group.gather_objects(mine)
            different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
            if different:
                raise ValueError(
                    f"All {group.size} members of the replica group `{group.name}` must list the "
                    "same parameters (name, shape, dtype) in the same order, but members "
                    f"{different} differ from member 0. Member {group.rank}, this process, lists "
                    f"{len(held[group.name])} parameters."
                )

    def require_equal_values(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Raise on every member of a group whose members hold different values of a parameter.

        Compares an exact checksum of each parameter's bits. One small collective for each group of
        two or more that holds a parameter here; one read from the device for each.

        Args:
            parameters: `(global name, parameter)`, contiguous, which passed `require_agreement`.

        Raises:
            ValueError: the bits of a parameter are not the same on all of its replicas.
        """
        held: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in self._groups}
        for name, parameter in parameters:
            held[self.of(name, parameter).name].append((name, parameter))
        # Every group is asked before any raises: the members of a sound one do not wait in vain.
        differing = {name: self._groups[name].differing(held[name]) for name in self._groups}
        for group, names in differing.items():
            if names:
                shown = ", ".join(f"`{name}`" for name in names[:_NAMES_SHOWN])
                more = len(names) - _NAMES_SHOWN
                raise ValueError(
                    f"All {self._groups[group].size} members of the replica group `{group}` must "
                    f"hold the same values, but they differ in {len(names)} of "
                    f"{len(held[group])} parameters: {shown}"
                    + (f" and {more} more. " if more > 0 else ". ")
                    + "Initialise the replicas from the same seed, or broadcast the parameters "
                    "from one member to the others first."
                )


def _describe(name: str, process_group: ProcessGroup | None) -> ReplicaGroup:
    if process_group is None:
        return ReplicaGroup(name, None, size=1, rank=0)
    rank = dist.get_rank(process_group)
    size = dist.get_world_size(process_group) if rank >= 0 else 0
    return ReplicaGroup(name, process_group, size, rank)
