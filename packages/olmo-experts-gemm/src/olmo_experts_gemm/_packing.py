"""Saved activations in another form, such as a quantised one, between forward and backward.

Hooks on what operators save take the place of torch's own check that nobody has written to a saved
tensor since. So that check is made here, on every tensor that is kept as it is.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ._checks import name_of
from ._deferral import Defer


class SavedActivationPacker(Protocol):
    """Keeps an activation for backward in a form of its own.

    `unpack(pack(tensor))` gives a tensor of the same shape, dtype and device. If it gives other
    values, the gradients are those of other values: a form that shares memory with `tensor`
    changes with it, and nobody notices.
    """

    def pack(self, tensor: Tensor, /) -> object:
        """Return what is held in place of `tensor`, which may have gaps between its rows."""
        ...

    def unpack(self, packed: object, /) -> Tensor:
        """Return the tensor that `packed` was made of, as often as it is asked for."""
        ...


@dataclass(frozen=True, slots=True)
class _Kept:
    tensor: Tensor
    version: int

    def get(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{self.tensor.type()} {list(self.tensor.shape)}] is at "
                f"version {self.tensor._version}; expected version {self.version} instead. `pack` "
                "keeps weights, maps and offsets as they are: run backward before changing them, "
                "or pass a copy."
            )
        return self.tensor


@dataclass(frozen=True, slots=True)
class _Packed:
    packer: SavedActivationPacker
    content: object
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def get(self) -> Tensor:
        tensor = self.packer.unpack(self.content)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"`pack.unpack` must return a tensor, got {type(tensor).__name__}.")
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise ValueError(
                f"`pack.unpack` must return {name_of(self.dtype)} of shape {tuple(self.shape)}, "
                f"got {name_of(tensor.dtype)} of shape {tuple(tensor.shape)}."
            )
        if tensor.device != self.device:
            raise ValueError(
                f"`pack.unpack` must return a tensor on {self.device}, where `pack` was given it, "
                f"got one on {tensor.device}."
            )
        return tensor


def packing(
    packer: SavedActivationPacker | None, is_activation: Callable[[Tensor], bool]
) -> AbstractContextManager[object]:
    """Pack the activations that operators save inside, each once; the rest they save as it is."""
    return nullcontext() if packer is None else _hooks(packer, is_activation)


@contextmanager
def _hooks(
    packer: SavedActivationPacker, is_activation: Callable[[Tensor], bool]
) -> Iterator[None]:
    # Two operators may save one activation. The tensor is held beside what was made of it, so that
    # no other takes its place in memory meanwhile.
    made: dict[tuple[object, ...], tuple[Tensor, _Packed]] = {}

    def pack(tensor: Tensor) -> _Kept | _Packed:
        if not is_activation(tensor):
            return _Kept(tensor, tensor._version)
        key = (*place_of(tensor), tensor._version)
        if key not in made:
            form = (tensor.shape, tensor.dtype, tensor.device)
            made[key] = (tensor, _Packed(packer, packer.pack(tensor.detach()), *form))
        return made[key][1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.get()):
        try:
            yield
        finally:
            made.clear()


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """What tells one tensor from another, also from another view of the same memory."""
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def refuse_compilation(
    pack: SavedActivationPacker | None = None, defer: Defer | None = None
) -> None:
    """A compiler would trace into these functions, or save what they were to change."""
    if torch.compiler.is_compiling():
        if pack is not None:
            _raise_while_compiling("pack", "a packer")
        if defer is not None:
            _raise_while_compiling("defer", "a function")


def _raise_while_compiling(name: str, got: str) -> None:
    raise NotImplementedError(
        f"`{name}` must stay None under `torch.compile`, got {got} while compiling; decorate what "
        f"calls the experts with `torch.compiler.disable`, or leave `{name}` out."
    )


# Called while a graph is traced, not traced itself: a traced exception would break the graph and
# run the call once more without the compiler.
_raise_while_compiling._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess] # what torch.compiler.assume_constant_result sets, without importing the compiler
