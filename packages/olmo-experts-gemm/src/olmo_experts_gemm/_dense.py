"""How an operand lies in memory, and the copy of one that a kernel cannot read."""

import torch
from torch import Tensor

ALIGNMENT_BYTES = 16


def is_dense(tensor: Tensor) -> bool:
    """Row-major without gaps, and aligned. `is_contiguous` ignores strides of dimensions of 1."""
    strides = [1]
    for size in reversed(tensor.shape[1:]):
        strides.insert(0, strides[0] * size)
    return tensor.stride() == tuple(strides) and tensor.data_ptr() % ALIGNMENT_BYTES == 0


def copy(tensor: Tensor) -> Tensor:
    """A dense copy."""
    return tensor.clone(memory_format=torch.contiguous_format)


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself when it is dense, else a dense copy."""
    return tensor if is_dense(tensor) else copy(tensor)
