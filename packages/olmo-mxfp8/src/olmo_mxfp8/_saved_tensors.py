"""The hooks of `MXPacker.saved_tensors`: what of all that autograd saves is kept in MXFP8.

Autograd hands a hook everything: activations, weights, token ids, statistics of a norm. Only the
first may be rounded. A parameter is known by its type, a view by its base, and a copy in another
dtype, which autocast makes, by the graph that leads back to the parameter.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ._formats import SOURCES

_COPIES = frozenset(
    f"{operation}Backward0"
    for operation in (
        *("ToCopy", "Clone", "Alias", "View", "UnsafeView", "ReshapeAlias", "AsStrided", "Expand"),
        *("T", "Transpose", "Permute", "Slice", "Select", "Split", "Unbind", "Unsqueeze"),
    )
)
"""Nodes whose result holds values of their one input."""


class _Copy:
    """A rounded activation, held as long as any part of a graph needs it."""

    def __init__(self, packed: Any, memory: StorageWeakRef) -> None:
        self.packed = packed
        self.memory = memory


class _Rounded(NamedTuple):
    copy: _Copy
    shape: torch.Size


class _Untouched(NamedTuple):
    tensor: Tensor
    version: int


class SelectingHooks:
    """A pack and an unpack hook that round some tensors and pass all others on.

    Args:
        pack: Makes what is held in place of a tensor.
        unpack: Makes the rounded tensor of it again.
        block: What the last dimension must be a multiple of.
        min_numel: The number of values from which on a tensor is rounded, at least 1.
        select: Says of each that the rules admit whether to round it; None rounds all.
    """

    def __init__(
        self,
        pack: Callable[[Tensor], Any],
        unpack: Callable[[Any], Tensor],
        *,
        block: int,
        min_numel: int,
        select: Callable[[Tensor], bool] | None,
    ) -> None:
        self._pack, self._unpack = pack, unpack
        self._block, self._min_numel, self._select = block, min_numel, select
        self._copies: WeakValueDictionary[tuple[object, ...], _Copy] = WeakValueDictionary()

    def pack(self, tensor: Tensor) -> _Rounded | _Untouched:
        """Return what the graph holds. An activation that several operations save is held once."""
        # Detached, because the result of a node, saved by that node, would keep itself alive.
        values = tensor.detach()
        if not self._takes(tensor):
            return _Untouched(values, values._version)
        if values.is_contiguous():  # views of one activation have the same rows
            values = values.view(-1, values.shape[-1])
        memory = StorageWeakRef(values.untyped_storage())
        place = (memory.cdata, values.storage_offset(), values.shape, values.stride())
        key = (*place, values.dtype, values._version)
        # The weak reference in a copy keeps other memory from taking this name.
        copy = self._copies.get(key)
        if copy is None or copy.memory.expired():
            copy = self._copies[key] = _Copy(self._pack(values), memory)
        return _Rounded(copy, tensor.shape)

    def unpack(self, saved: _Rounded | _Untouched) -> Tensor:
        """Return the rounded tensor, or the one that was passed on.

        Raises:
            RuntimeError: That one has changed since; torch does not look where there are hooks.
        """
        if isinstance(saved, _Rounded):
            return self._unpack(saved.copy.packed).view(saved.shape)
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a saved tensor of shape {tuple(saved.tensor.shape)} is at "
                f"version {saved.tensor._version} and was saved at version {saved.version}; call "
                "`backward` before changing it."
            )
        return saved.tensor

    def _takes(self, tensor: Tensor) -> bool:
        fits = (
            type(tensor) is Tensor
            and tensor.layout == torch.strided
            and tensor.dtype in SOURCES
            and tensor.ndim > 0
            and tensor.numel() >= self._min_numel
            and tensor.shape[-1] % self._block == 0
            # What is expanded would grow.
            and tensor.nbytes <= tensor.untyped_storage().nbytes()
        )
        if not fits or _is_of_parameter(tensor):
            return False
        return self._select is None or self._select(tensor)


def _is_of_parameter(tensor: Tensor) -> bool:
    """Whether this is a parameter, a view of one, or a copy or cast of either."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        return True
    node = base.grad_fn
    while node is not None and node.name() in _COPIES:
        node = node.next_functions[0][0]
    # Of all nodes only that which ends a graph has a variable.
    return isinstance(getattr(node, "variable", None), nn.Parameter)
