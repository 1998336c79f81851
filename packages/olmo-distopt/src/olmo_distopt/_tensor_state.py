"""The part of one parameter's optimizer state that this process keeps.

The parameter is flattened and each of its replicas owns one range of the line: its FP32 main
weights and its moments. Or every replica keeps everything, where the tensor is not cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ._flat_shard import FlatShard, Location
from ._groups import ReplicaGroup
from ._parameters import main_grad, require_values, scattered_range
from ._partition import Range


@dataclass(frozen=True, slots=True)
class Plan:
    """What an optimizer keeps of a parameter, and where.

    Attributes:
        ranges: the range of each replica, in rank order, together the whole line. None: not cut.
        moments: dtype of each moment, by its name in a checkpoint.
    """

    ranges: Sequence[Range] | None
    moments: Mapping[str, torch.dtype]


@dataclass(frozen=True, slots=True)
class TensorState:
    """One parameter and this process's part of what the optimizer knows about it."""

    name: str
    parameter: nn.Parameter
    group: ReplicaGroup
    ranges: Sequence[Range] | None
    decay: float  # factor of the weight decay
    lr_scale: float  # factor of the learning rate
    global_first: int  # of the range owned, in the flattened global tensor
    global_numel: int
    main: torch.Tensor  # (length,) float32
    moments: dict[str, torch.Tensor]  # (length,) each

    @property
    def own(self) -> Range:
        """The elements of the flattened parameter that this process keeps the state of."""
        if self.ranges is None:
            return Range(0, self.main.numel())
        return self.ranges[self.group.rank]

    def slice_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements owned of a tensor of the parameter's shape, a flat view."""
        line = tensor.detach().view(-1)
        return line if self.ranges is None else line.narrow(0, *self.own)

    def whereabouts(self) -> tuple[object, ...]:
        """Return where a step finds the gradient and the parameter: equal as long as none moves.

        Cheap, for it is asked of every parameter in every step: no tensor is made. The main weights
        and the moments never move.
        """
        parameter, attributes = self.parameter, vars(self.parameter)
        grad = attributes.get("main_grad")
        if grad is None:
            return ()
        return (
            *(grad.data_ptr(), grad.numel(), grad.dtype, grad.is_contiguous()),
            *(parameter.data_ptr(), parameter.dtype),
            *(attributes.get("main_grad_range"), attributes.get("main_grad_window")),
        )

    def require_gradient(self) -> None:
        """Raise unless the parameter and the elements owned of its gradient can be stepped.

        Raises:
            ValueError: the parameter is on the meta device, or no longer contiguous where its main
                weights are; there is no contiguous `main_grad` of its shape on its device; or its
                sum over the replicas was scattered in other ranges than those of this state.
        """
        parameter, main = self.parameter, self.main
        require_values(self.name, parameter)
        if parameter.device != main.device or not parameter.is_contiguous():
            raise ValueError(
                f"Parameter `{self.name}` must stay contiguous and on {main.device}, where its "
                f"optimizer was made, got strides {parameter.stride()} on {parameter.device}; move "
                "a model first, then make its reducer and its optimizer."
            )
        grad, held = main_grad(self.name, parameter), scattered_range(parameter)
        if grad.device != main.device or not grad.is_contiguous():
            raise ValueError(
                f"`main_grad` of `{self.name}` must be contiguous and on {main.device}, got "
                f"strides {grad.stride()} on {grad.device}."
            )
        if held is not None and held != self.own:
            raise ValueError(
                f"`main_grad` of `{self.name}` must hold the sum over the replicas in the elements "
                f"{_words(self.own)} that this process updates, but the reduce-scatter left it in "
                f"{_words(held)}. Give the reducer and the optimizer the same `min_shard_numel`, "
                "or use `collective='all_reduce'` (always with `ShardedMuon`)."
            )

    def grad(self) -> torch.Tensor:
        """Return the elements owned of `main_grad`, which `require_gradient` has passed."""
        return self.slice_of(main_grad(self.name, self.parameter))

    def labelled(self) -> dict[str, FlatShard]:
        """Return the tensors that a checkpoint holds, by key, as ranges of the global tensors."""
        return {
            f"{kind}.{self.name}": FlatShard(
                tensor, start=self.global_first, global_numel=self.global_numel
            )
            for kind, tensor in {"main": self.main, **self.moments}.items()
        }


def _words(held: Range) -> str:
    return f"[{held.first}, {held.first + held.length})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """What will be kept of one parameter: checked, and nothing allocated."""

    name: str
    parameter: nn.Parameter
    group: ReplicaGroup
    plan: Plan
    decay: float
    lr_scale: float
    location: Location | None

    def __post_init__(self) -> None:
        if self.parameter.dtype.itemsize > 4:
            raise ValueError(
                f"Parameter `{self.name}` must be of at most 32 bits, the precision of its main "
                f"weight, got {self.parameter.dtype}."
            )
        if self.group.size > 1:
            require_values(self.name, self.parameter)  # they are compared
        self._global_line()

    def described(self) -> tuple[object, ...]:
        """Return what must be the same on all replicas."""
        parameter, plan = self.parameter, self.plan
        factors = (self.decay, self.lr_scale)
        moments = sorted((kind, str(dtype)) for kind, dtype in plan.moments.items())
        line = (tuple(parameter.shape), str(parameter.dtype), self._global_line())
        return (self.name, *line, *factors, moments, plan.ranges)

    def make_state(self) -> TensorState:
        """Return FP32 main weights from the parameter's values, and moments of zeros."""
        plan, numel = self.plan, self.parameter.numel()
        flat_start, global_numel = self._global_line()
        first, length = plan.ranges[self.group.rank] if plan.ranges is not None else (0, numel)
        line = self.parameter.detach().view(-1).narrow(0, first, length)
        main = line.to(torch.float32, copy=True)
        return TensorState(
            name=self.name,
            parameter=self.parameter,
            group=self.group,
            ranges=plan.ranges,
            decay=self.decay,
            lr_scale=self.lr_scale,
            global_first=flat_start + first,
            global_numel=global_numel,
            main=main,
            moments={kind: torch.zeros_like(main, dtype=d) for kind, d in plan.moments.items()},
        )

    def _global_line(self) -> tuple[int, int]:
        """Return where the parameter starts in the flattened global tensor, and its length."""
        if self.location is None:
            return 0, self.parameter.numel()
        return self.location.flat_range(self.name, self.parameter.shape)
