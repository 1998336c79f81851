"""The slice of one parameter's optimizer state that this process keeps, and its way back.

A flattened tensor of `numel` elements and its replica group of size `D`: with `numel % D == 0` and
enough elements, process `r` keeps `[r numel / D, (r + 1) numel / D)`, else every process keeps all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ._flat_shard import FlatShard, Location
from ._groups import ReplicaGroup


@dataclass(frozen=True, slots=True)
class TensorState:
    """One parameter and this process's slice of what the optimizer knows about it."""

    name: str
    parameter: nn.Parameter
    group: ReplicaGroup
    decays: bool
    first: int  # of the slice, in the flattened parameter
    global_first: int  # of the slice, in the flattened global tensor
    global_numel: int
    main: torch.Tensor  # (length,) float32; the moments likewise
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    @property
    def sharded(self) -> bool:
        """Whether other replicas keep the rest of the tensor."""
        return self.main.numel() < self.parameter.numel()

    def slice_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice that this process keeps of a tensor of the parameter's shape, a view."""
        return tensor.detach().view(-1).narrow(0, self.first, self.main.numel())

    def labelled(self) -> dict[str, FlatShard]:
        """Return the tensors that a checkpoint holds, by key, as slices of the global tensors."""
        tensors = {"main": self.main, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {
            f"{kind}.{self.name}": FlatShard(
                tensor, start=self.global_first, global_numel=self.global_numel
            )
            for kind, tensor in tensors.items()
        }


def new_state(
    name: str,
    parameter: nn.Parameter,
    group: ReplicaGroup,
    *,
    decays: bool,
    min_shard_numel: int,
    location: Location | None,
) -> TensorState:
    """Cut one parameter: FP32 main weights from its values, moments of zeros."""
    if not parameter.is_floating_point() or parameter.dtype.itemsize > 4:
        raise ValueError(
            f"Parameter `{name}` must be of a floating dtype of at most 32 bits, the precision of "
            f"its main weight, got {parameter.dtype}."
        )
    numel = parameter.numel()
    flat_start, global_numel = 0, numel
    if location is not None:
        flat_start, global_numel = location.flat_range(name, parameter.shape)
    sharded = group.size > 1 and numel % group.size == 0 and numel >= min_shard_numel
    length = numel // group.size if sharded else numel
    first = group.rank * length if sharded else 0
    piece = parameter.detach().view(-1).narrow(0, first, length)
    main = piece.to(torch.float32, copy=True)
    return TensorState(
        name=name,
        parameter=parameter,
        group=group,
        decays=decays,
        first=first,
        global_first=flat_start + first,
        global_numel=global_numel,
        main=main,
        exp_avg=torch.zeros_like(main),
        exp_avg_sq=torch.zeros_like(main),
    )


def gather_parameters(states: list[TensorState]) -> None:
    """Rebuild parameters of one group, device and dtype with one all-gather."""
    group, like = states[0].group, states[0].parameter
    sent = torch.cat([state.main.to(like.dtype) for state in states])
    received = torch.empty(group.size, sent.numel(), dtype=like.dtype, device=like.device)
    # As bytes: a gather needs no arithmetic, and not every backend knows every dtype.
    dist.all_gather_into_tensor(
        received.view(-1).view(torch.uint8), sent.view(torch.uint8), group=group.process_group
    )
    pieces = received.split([state.main.numel() for state in states], dim=1)
    for state, piece in zip(states, pieces, strict=True):
        state.parameter.view(group.size, -1).copy_(piece)
