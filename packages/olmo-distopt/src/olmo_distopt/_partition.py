"""How the elements of a flattened tensor are shared out among its replicas.

The rule of AdamW, and of a reduce-scatter: `D` equal contiguous ranges where `D` divides the number
of elements and there are enough of them, else every replica keeps the whole tensor. No range is
ever cut by another tensor's neighbour, so a range is all that a checkpoint needs to know.
"""

from typing import NamedTuple

MIN_SHARD_NUMEL = 4096


class Range(NamedTuple):
    """Elements `[first, first + length)` of a flattened tensor."""

    first: int
    length: int


def equal_ranges(numel: int, size: int, min_numel: int) -> list[Range] | None:
    """Return the range of each of `size` replicas, or None where each keeps the whole tensor.

    Args:
        numel: elements of the tensor.
        size: replicas, >= 1.
        min_numel: a tensor with fewer elements is kept whole.
    """
    if size == 1 or numel == 0 or numel % size or numel < min_numel:
        return None
    length = numel // size
    return [Range(rank * length, length) for rank in range(size)]
