"""Saved activations in another form, such as a quantised one, between forward and backward."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ._checks import name_of


class SavedActivationPacker(Protocol):
    """Keeps an activation for backward in a form of its own.

    `unpack(pack(tensor))` gives a tensor of the same shape, dtype and device. If it gives other
    values, the gradients are those of other values.
    """

    def pack(self, tensor: Tensor, /) -> object:
        """Return what is held in place of `tensor`, which may have gaps between its rows."""
        ...

    def unpack(self, packed: object, /) -> Tensor:
        """Return the tensor that `packed` was made of."""
        ...


@dataclass(frozen=True, slots=True)
class _Packed:
    content: object
    shape: torch.Size
    dtype: torch.dtype


def packing(
    packer: SavedActivationPacker | None, is_activation: Callable[[Tensor], bool]
) -> AbstractContextManager[object]:
    """Pack the activations that operators save inside; the rest they save as it is."""
    if packer is None:
        return nullcontext()

    def pack(tensor: Tensor) -> object:
        if not is_activation(tensor):
            return tensor
        return _Packed(packer.pack(tensor.detach()), tensor.shape, tensor.dtype)

    def unpack(saved: object) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        assert isinstance(saved, _Packed), "only what `pack` returned comes back"
        tensor = packer.unpack(saved.content)
        if tensor.shape != saved.shape or tensor.dtype != saved.dtype:
            raise ValueError(
                f"`pack.unpack` must return {name_of(saved.dtype)} of shape {tuple(saved.shape)}, "
                f"got {name_of(tensor.dtype)} of shape {tuple(tensor.shape)}."
            )
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def memory_of(tensor: Tensor) -> int:
    """What tells one tensor's memory from another's; views share it."""
    return tensor.untyped_storage().data_ptr()
