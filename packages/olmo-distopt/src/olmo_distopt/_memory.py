"""What the weights, their gradients and the optimizer's state take, by formula and as measured.

For a parameter of n elements with D replicas:

    weight            n * (bytes of its dtype)
    gradient          n * (4, or 8 where a reducer adds in float64)
    optimizer state   (4 + bytes of its moments) n / D

which for BF16 weights and FP32 moments is `6 + 12/D` bytes a parameter on each process, for an
expert `6/M + 12/D_all` of all the experts' parameters when M processes share them out; with BF16
moments 8 instead of 12, for Muon's matrices 8, or 6 with BF16 momentum. Measured is more where a
tensor is kept whole, and more or less where whole matrices are shared out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ._groups import ReplicaGroups
from ._parameters import trainable
from ._sharded_optimizer import ShardedOptimizer


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Bytes on this process, by formula and as the storages measure."""

    predicted: float
    measured: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What one process holds for its parameters between steps.

    Attributes:
        num_parameters: elements of the trainable parameters that this process holds.
        weights: the parameters themselves.
        gradients: `main_grad`; without a `GradientReducer` predicted as with one of float32, and
            measured 0.
        optimizer: main weights and moments.
    """

    num_parameters: int
    weights: MemoryPart
    gradients: MemoryPart
    optimizer: MemoryPart

    @property
    def total(self) -> MemoryPart:
        """All three together."""
        parts = (self.weights, self.gradients, self.optimizer)
        return MemoryPart(sum(p.predicted for p in parts), sum(p.measured for p in parts))

    def __str__(self) -> str:
        """A table of bytes a parameter and MiB."""
        lines = [f"{self.num_parameters} parameters    predicted            measured"]
        parts = [("weights", self.weights), ("gradients", self.gradients)]
        for name, part in [*parts, ("optimizer", self.optimizer), ("total", self.total)]:
            each = max(1, self.num_parameters)
            lines.append(
                f"{name:<10}"
                f"{part.predicted / each:8.3f} B {part.predicted / 2**20:10.1f} MiB"
                f"{part.measured / each:8.3f} B {part.measured / 2**20:10.1f} MiB"
            )
        return "\n".join(lines)


def memory_report(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    replica_groups: ReplicaGroups,
    optimizer: ShardedOptimizer,
) -> MemoryReport:
    """Return what this process holds for its parameters, beside what the formula says.

    Args:
        named_parameters: those of the optimizer.
        replica_groups: those of the optimizer.
        optimizer: a `ShardedAdamW` or `ShardedMuon`; its state is not loading.

    Raises:
        ValueError: a parameter is not the optimizer's.
        RuntimeError: its state is loading.

    Note:
        Counts storages, each once; what an allocator rounds up or keeps is not in it. Not counted
        either: activations, and the buffers of a collective while it runs.
    """
    parameters = trainable(named_parameters)
    state = {key: getattr(value, "local", value) for key, value in optimizer.state_dict().items()}
    state_bytes: dict[str, int] = {}
    for key, tensor in state.items():
        _, _, name = key.partition(".")
        state_bytes[name] = state_bytes.get(name, 0) + tensor.element_size()
    own = optimizer.parameters  # one of the same name is not
    strange = [name for name, parameter in parameters if parameter not in own]
    if strange:
        raise ValueError(
            f"`named_parameters` must be those of the optimizer, which has no {strange}; it keeps "
            "those that required a gradient when it was made."
        )
    grads = {p: vars(p)["main_grad"] for _, p in parameters if "main_grad" in vars(p)}
    numel = sum(parameter.numel() for _, parameter in parameters)
    sharded = sum(
        parameter.numel() * state_bytes[name] / replica_groups.of(name, parameter).size
        for name, parameter in parameters
    )
    summed = sum(
        p.numel() * (grads[p].element_size() if p in grads else torch.float32.itemsize)
        for _, p in parameters
    )
    return MemoryReport(
        num_parameters=numel,
        weights=MemoryPart(
            sum(p.numel() * p.element_size() for _, p in parameters),
            _measure([p for _, p in parameters]),
        ),
        gradients=MemoryPart(summed, _measure(list(grads.values()))),
        optimizer=MemoryPart(sharded, _measure(list(state.values()))),
    )


def _measure(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages behind the tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
