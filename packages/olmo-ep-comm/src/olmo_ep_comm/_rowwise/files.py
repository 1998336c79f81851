"""Buffers in files that all ranks of one host map: the one-sided exchange between CPU processes."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .memory import Shared, pointer_table

_MEMORY_FOLDER = Path("/dev/shm")
_LONGEST_NAME = 4096


class FileMemory:
    """One rank in each process of a group on one host."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self.ranks: Sequence[int] = (self._rank,)
        self.num_ranks = dist.get_world_size(group)
        self.device = torch.device("cpu")

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Shared:
        """Make a file for each rank, map all of them, and leave nothing in the file system.

        Raises:
            RuntimeError: On every rank, if one has no room or does not see the files of the others.
        """
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        folder = _MEMORY_FOLDER if _MEMORY_FOLDER.is_dir() else Path(tempfile.gettempdir())
        with tempfile.NamedTemporaryFile(prefix="olmo-ep-comm-", dir=folder) as file:
            has_room = _reserve(file.fileno(), num_bytes)
            paths = [Path(name) for name in self._gather_names(file.name if has_room else "")]
            without = [rank for rank, path in enumerate(paths) if path == Path()]
            if without:
                raise RuntimeError(
                    f"Buffers between CPU processes must fit into `{folder}`, but rank(s) {without}"
                    f" of the group found no room for {num_bytes} bytes; lower `max_tokens`, "
                    "`capacity` or `live_forwards`, or make it larger (docker run --shm-size)."
                )
            # `from_file` would make a file that is not there, and nobody else would see it.
            is_seen = all(path.is_file() for path in paths)
            every = [_map(path, num_bytes, shape, dtype) for path in paths if is_seen]
            # Nobody is past this before all are here: a file must not go before all have mapped it.
            apart = [i for i, name in enumerate(self._gather_names("x" * is_seen)) if not name]
        if apart:
            raise RuntimeError(
                "Ranks of a gloo group exchange rows through files, so that all must run on one "
                f"host and share its `{folder}`, but rank(s) {apart} of the group do not see the "
                'files of the others; use "all_to_all" between hosts.'
            )
        return Shared([every[self._rank]], every, pointer_table(every, self.device))

    def barrier(self) -> None:
        """Wait for all ranks; what they wrote before is in the files."""
        dist.barrier(self._group)

    def _gather_names(self, name: str) -> list[str]:
        # Not `all_gather_object`, which needs numpy.
        mine = torch.zeros(_LONGEST_NAME, dtype=torch.uint8)
        letters = list(name.encode())
        mine[: len(letters)] = torch.tensor(letters, dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(every, mine, group=self._group)
        return [bytes(value.tolist()).rstrip(b"\0").decode() for value in every]


def _reserve(descriptor: int, num_bytes: int) -> bool:
    """Make the file large enough; False if there is no room.

    A file that was only truncated takes its room when it is written: without any, a signal then
    ends the process.
    """
    try:
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(descriptor, 0, num_bytes)
        else:
            os.truncate(descriptor, num_bytes)
    except OSError:
        return False
    return True


def _map(path: Path, num_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=num_bytes)
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)  # pyright: ignore[reportArgumentType, reportCallIssue] - untyped storages are allowed
