"""Buffers that GPUs of one NVLink domain map of each other: torch's symmetric memory.

`torch.distributed._symmetric_memory` is private to torch; the calls below are those of torch 2.9 to
2.11 and nothing else in this package touches it. Allocation is collective and waits on the host; a
barrier is one small kernel, and can be captured in a CUDA graph.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .memory import Shared, pointer_table


class SymmetricMemory:
    """One rank in each process of a group, each with a GPU of its own."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
        """Make a memory.

        Args:
            group: The ranks.
            device: This rank's GPU, with its index.
            timeout_s: Seconds after which a barrier gives up on the other ranks: it traps, which
                ends the CUDA context, so that a rank that is missing cannot hang the others.
        """
        self._group = group
        self._timeout_ms = round(timeout_s * 1000)
        self._handles: list[Any] = []
        self.ranks: Sequence[int] = (dist.get_rank(group),)
        self.num_ranks = dist.get_world_size(group)
        self.device = device

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Shared:
        """Allocate this rank's buffer and map those of the others."""
        import torch.distributed._symmetric_memory as symmetric  # seconds of work: only on GPUs

        own = symmetric.empty(*shape, dtype=dtype, device=self.device)
        handle: Any = symmetric.rendezvous(own, self._group.group_name)
        self._handles.append(handle)  # a buffer is mapped as long as its handle lives
        # Not `buffer_ptrs`: those are the bases of allocations, and a buffer may be inside of one.
        every = [handle.get_buffer(peer, shape, dtype) for peer in range(self.num_ranks)]
        return Shared([own], every, pointer_table(every, self.device))

    def barrier(self) -> None:
        """Enqueue a barrier on the current stream.

        It is that of the first buffer, so that two dispatchers never share a channel.
        """
        self._handles[0].barrier(channel=0, timeout_ms=self._timeout_ms)
