"""Buffers in files that all ranks of one host map: the one-sided exchange between CPU processes."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .memory import Shared, pointer_table

_MEMORY_FOLDER = Path("/dev/shm")


class FileMemory:
    """One rank in each process of a group on one host."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self.ranks: Sequence[int] = (self._rank,)
        self.num_ranks = dist.get_world_size(group)
        self.device = torch.device("cpu")

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Shared:
        """Make a file for each rank, map all of them, and leave nothing in the file system."""
        num_bytes = dtype.itemsize
        for length in shape:
            num_bytes *= length
        folder = _MEMORY_FOLDER if _MEMORY_FOLDER.is_dir() else None
        with tempfile.NamedTemporaryFile(prefix="olmo-ep-comm-", dir=folder) as file:
            file.truncate(num_bytes)
            names: list[str] = [""] * self.num_ranks
            dist.all_gather_object(names, file.name, group=self._group)
            every = [_map(name, num_bytes, shape, dtype) for name in names]
            dist.barrier(self._group)  # a file must not go before all have mapped it
        return Shared([every[self._rank]], every, pointer_table(every, self.device))

    def barrier(self) -> None:
        """Wait for all ranks; what they wrote before is in the files."""
        dist.barrier(self._group)


def _map(name: str, num_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    storage = torch.UntypedStorage.from_file(name, shared=True, nbytes=num_bytes)
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)  # pyright: ignore[reportArgumentType, reportCallIssue] - untyped storages are allowed
