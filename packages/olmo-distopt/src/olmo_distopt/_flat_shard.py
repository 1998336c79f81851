"""A slice of a global tensor, as torch.distributed.checkpoint reads and writes it.

A checkpoint must not know the layout that wrote it. So every tensor is saved in *global flat
coordinates*: the global tensor in row-major order is one line of `N` elements, and each process
holds some range `[start, start + length)` of it.

    expert stack [E, H, D], E = 4, on expert rank 1 of 2 and optimizer shard 0 of 2

    | expert 0 | expert 1 | expert 2 | expert 3 |      N = 4 H D
                          [ start    )                 start = 2 H D, length = H D

Two layouts cut the line at different places and nothing else differs between them. The checkpoint
writer stores each distinct range once; the reader copies the overlaps of what it wants with what
there is. A data-parallel shard of the optimizer, an expert-parallel stack and a pipeline stage that
holds only some of the names need no cases of their own.

Protocol: `torch.distributed._checkpointable._Checkpointable`, private to torch; as of torch 2.11.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

# torch.distributed.checkpoint takes as long to import as torch itself. It is imported where it
# calls, and has been imported by then.
if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


@dataclass(frozen=True, slots=True)
class Location:
    """Where a process's tensor lies in the global tensor: some rows of it, along dimension 0.

    Attributes:
        global_shape: shape of the global tensor, as `(E, 2H, D)` of a stack of all experts.
        first_row: index in the global tensor of the process's first row, in [0, global_shape[0]).
    """

    global_shape: tuple[int, ...]
    first_row: int

    def flat_range(self, name: str, shape: Sequence[int]) -> tuple[int, int]:
        """Return (flat start of the rows held, elements of the global tensor).

        Args:
            name: the tensor's name, for the message.
            shape: shape of the rows that this process holds.

        Raises:
            ValueError: the rows do not lie within the global tensor.
        """
        rows = self.global_shape[0] if self.global_shape else 0
        fits = (
            len(shape) == len(self.global_shape) >= 1
            and tuple(shape[1:]) == tuple(self.global_shape[1:])
            and 0 <= self.first_row <= rows - shape[0]
        )
        if not fits:
            raise ValueError(
                f"The rows of `{name}` must lie within the global tensor along dimension 0, got "
                f"shape {tuple(shape)} at row {self.first_row} of {tuple(self.global_shape)}."
            )
        return self.first_row * math.prod(shape[1:]), math.prod(self.global_shape)


class FlatShard(torch.Tensor):
    """The range `[start, start + length)` of a global tensor laid out as one line of elements.

    To torch.distributed.checkpoint it is a tensor of shape `(global_numel,)` of which this process
    holds one piece; to everyone else it is a label around `local`. It does no arithmetic.

    Args:
        local: the elements held, of any contiguous shape; not copied. Loading writes into it.
        start: index of its first element in the line, in [0, global_numel - local.numel()].
        global_numel: length of the line. None: `start + local.numel()`, the whole tensor when
            `start` is 0.

    Attributes:
        local: (length,), a view of the storage given.
        start: as given.

    Raises:
        ValueError: `local` is not contiguous, or the range leaves the line.
    """

    local: torch.Tensor
    start: int

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, *, start: int = 0, global_numel: int | None = None
    ) -> FlatShard:
        """Check the range and make the label."""
        if not local.is_contiguous():
            raise ValueError(
                f"`local` must be contiguous, got shape {tuple(local.shape)} with strides "
                f"{local.stride()}; a copy would not be loaded into."
            )
        length = local.numel()
        total = start + length if global_numel is None else global_numel
        if start < 0 or start + length > total:
            raise ValueError(
                f"The range [`start`, `start` + length) must lie in [0, `global_numel`={total}), "
                f"got [{start}, {start + length})."
            )
        return torch.Tensor._make_wrapper_subclass(
            cls, (total,), dtype=local.dtype, device=local.device
        )

    def __init__(
        self, local: torch.Tensor, *, start: int = 0, global_numel: int | None = None
    ) -> None:
        self.local = local.detach().view(-1)
        self.start = start

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse: a piece is not the tensor."""
        raise TypeError(f"A `FlatShard` holds one piece of a tensor; use `.local` with {func}.")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Name the range, never the values."""
        stop = self.start + self.local.numel()
        return f"FlatShard([{self.start}, {stop}) of {self.numel()}, {self.local.dtype})"

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Tell the checkpoint which ranges are held here: one, or none when it is empty."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        length = self.local.numel()
        if length == 0 and self.numel() > 0:
            return []  # An empty piece at the offset of a real one would be taken for its copy.
        return [ChunkStorageMetadata(torch.Size((self.start,)), torch.Size((length,)))]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """Tell the checkpoint what to write; replicas write the same index, which is kept once."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.local),
                    size=self.size(),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the elements that start at `index.offset`."""
        if index.offset is not None and tuple(index.offset) != (self.start,):
            raise ValueError(
                f"`{index.fqn}` holds the piece at {self.start}, got a request for "
                f"{tuple(index.offset)}."
            )
        return self.local
