"""Buffers that other ranks can write into, and the barrier between them.

A **memory** belongs to one group and serves the ranks of it that live in this process: one of
several processes, or all of them where virtual ranks share a process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """One buffer, of the same shape on every rank, as this process sees it.

    Attributes:
        own: The buffer of each rank of this process.
        every: The buffer of every rank of the group, where this process can address it as a tensor.
        pointers: int64 (ranks) on the device, the address of every rank's buffer.
    """

    own: list[Tensor]
    every: list[Tensor]
    pointers: Tensor

    def start(self, shape: tuple[int, ...], dtype: torch.dtype) -> "Shared":
        """Return the first bytes of each buffer, in another form."""
        numel = torch.Size(shape).numel()

        def view(buffer: Tensor) -> Tensor:
            return buffer.view(-1).view(dtype)[:numel].view(shape)

        return Shared(list(map(view, self.own)), list(map(view, self.every)), self.pointers)


class Stack:
    """Several buffers of one form, of which each rank says which one it has free.

    Attributes:
        buffers: The buffers.
        pointers: int64 (buffers, ranks), their addresses.
    """

    def __init__(self, buffers: Sequence[Shared]) -> None:
        self.buffers = list(buffers)
        self.pointers = torch.stack([buffer.pointers for buffer in buffers])


class Memory(Protocol):
    """Where the buffers of a group live.

    Attributes:
        ranks: The ranks of the group in this process.
        num_ranks: Ranks of the group.
        device: Where the buffers are.
    """

    ranks: Sequence[int]
    num_ranks: int
    device: torch.device

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Shared:
        """Allocate a buffer of the same shape on every rank; collective."""
        ...

    def barrier(self) -> None:
        """Order what this rank enqueued before against what the others enqueue after."""
        ...


class InProcessMemory:
    """All ranks in this process, on one device.

    Calls come in one order on one stream, so that there is nothing for a barrier to do as long as
    every phase is enqueued for all ranks before the next.
    """

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        self.ranks: Sequence[int] = range(num_ranks)
        self.num_ranks = num_ranks
        self.device = device

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Shared:
        """Allocate the buffers of all ranks."""
        every = [torch.empty(shape, dtype=dtype, device=self.device) for _ in self.ranks]
        return Shared(every, every, pointer_table(every, self.device))

    def barrier(self) -> None:
        """Do nothing: the order of the calls is the order of the ranks."""


def pointer_table(buffers: list[Tensor], device: torch.device) -> Tensor:
    """Return the addresses of `buffers`, int64 on `device`."""
    pointers = [buffer.data_ptr() for buffer in buffers]
    return torch.tensor(pointers, dtype=torch.int64, device=device)
