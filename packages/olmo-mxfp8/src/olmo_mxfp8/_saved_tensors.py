"""The hooks of `MXPacker.saved_tensors`: what of all that autograd saves is kept in MXFP8.

Autograd hands a hook everything: activations, weights, token ids, statistics of a norm. Only the
first may be rounded. An activation is what an operation has computed; the operation is the node
that the graph names, behind views and copies. Where none is left, the values are those of a leaf, a
parameter or an input, which the graph or the caller holds anyway, or a constant's.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef

from ._formats import SOURCES
from ._uncompiled import uncompiled

_LEAF = "torch::autograd::AccumulateGrad"

_VIEWS = frozenset(
    (
        *("Alias", "AsStrided", "Conj", "Diagonal", "Expand", "LiftFresh", "NegView", "Permute"),
        *("ReshapeAlias", "Select", "Slice", "Split", "SplitWithSizes", "Squeeze", "T"),
        *("Transpose", "Unbind", "Unfold", "Unsqueeze", "Values", "View", "ViewAsComplex"),
        "ViewAsReal",
    )
)
"""Operations whose result is a view of their one input."""
_COPIES = frozenset(
    (
        *("Clone", "LazyClone", "PinMemory", "Repeat", "ReshapeCopy", "ToCopy"),
        *("UnsafeSplit", "UnsafeSplitWithSizes", "UnsafeView"),
    )
)
"""Operations whose result holds values of their one input."""
_JOINS = frozenset(("CatBackward0", "StackBackward0", "torch::autograd::CopyBackwards"))
"""Nodes whose result holds values of all their inputs."""


class _Copy:
    """A rounded activation, held as long as any part of a graph needs it."""

    def __init__(self, packed: Any, memory: StorageWeakRef) -> None:
        self.packed = packed
        self.memory = memory


class _Rounded(NamedTuple):
    copy: _Copy
    shape: torch.Size
    strides: tuple[int, ...] | None
    """None: it comes back contiguous."""


class _Untouched(NamedTuple):
    tensor: Tensor
    version: int


class SelectingHooks:
    """A pack and an unpack hook that round some tensors and pass all others on.

    Args:
        pack: Makes what is held in place of a tensor.
        unpack: Makes the rounded tensor of it again, contiguous.
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

    @uncompiled(reason="what autograd saves is chosen on the host")
    def pack(self, tensor: Tensor) -> _Rounded | _Untouched:
        """Return what the graph holds. An activation that several operations save is held once."""
        # Detached, because the result of a node, saved by that node, would keep itself alive.
        values = tensor.detach()
        node = _computed_by(tensor) if self._fits(tensor) else None
        if node is None or not (self._select is None or self._select(tensor)):
            return _Untouched(values, values._version)
        straight = _in_memory_order(values)
        if straight is None or straight.shape[-1] % self._block:
            copy = self._copy(values, node, (values.shape, values.stride()))
            return _Rounded(copy, values.shape, None)
        # Blocks of whole rows are blocks of memory, so all permutations and reshapes share them.
        rows = straight.view(-1, straight.shape[-1])
        return _Rounded(self._copy(rows, node, rows.numel()), values.shape, values.stride())

    @uncompiled(reason="what autograd saves is chosen on the host")
    def unpack(self, saved: _Rounded | _Untouched) -> Tensor:
        """Return the rounded tensor, or the one that was passed on.

        Raises:
            RuntimeError: That one has changed since; torch does not look where there are hooks.
        """
        if isinstance(saved, _Rounded):
            values = self._unpack(saved.copy.packed)
            if saved.strides is None:
                return values
            return values.as_strided(saved.shape, saved.strides)
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a saved tensor of shape {tuple(saved.tensor.shape)} is at "
                f"version {saved.tensor._version} and was saved at version {saved.version}; call "
                "`backward` before changing it."
            )
        return saved.tensor

    def _fits(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.dtype in SOURCES
            and tensor.ndim > 0
            and tensor.numel() >= self._min_numel
            and tensor.shape[-1] % self._block == 0
            and not _overlaps(tensor)
        )

    def _copy(self, values: Tensor, node: Node, what: object) -> _Copy:
        """Return the copy of `values`, which `node` computed, made now or for another operation.

        A buffer can be written in ways that leave its version as it was, so equal memory is no
        proof of equal values. That one node computed both is: it ran once.
        """
        # Here, because these copies are of no use beyond the node and nothing else names it.
        metadata = cast(dict[Any, Any], node.metadata)  # a property, typed as a method
        copies = metadata.setdefault(self, WeakValueDictionary())
        memory = StorageWeakRef(values.untyped_storage())
        place = (memory.cdata, values.storage_offset(), values.dtype, values.is_neg())
        key = (*place, what, values._version)
        copy = copies.get(key)
        # The weak reference in a copy keeps other memory from taking this name.
        if copy is None or copy.memory.expired():
            copy = copies[key] = _Copy(self._pack(values), memory)
        return copy


def _computed_by(tensor: Tensor) -> Node | None:
    """Return the node that computed `tensor`, or None: it holds values of leaves and constants."""
    node = _behind_copies(tensor.grad_fn)
    if node is not None and node.name() in _JOINS:
        parts = (_behind_copies(each) for each, _ in node.next_functions)
        return node if any(part is not None for part in parts) else None
    return node


def _behind_copies(node: Node | None) -> Node | None:
    while node is not None:
        name = node.name()
        if name == _LEAF:
            return None
        # Nodes of torch end in a number; a function of the user's may be called anything else.
        operation, _, overload = name.partition("Backward")
        if not (overload[:1].isdigit() and (operation in _VIEWS or operation in _COPIES)):
            return node
        node = node.next_functions[0][0]
    return None


def _dims_outside_in(tensor: Tensor) -> list[int]:
    """The dimensions in the order in which memory has them; those of size 1 are outermost."""
    return sorted(range(tensor.ndim), key=lambda d: (tensor.shape[d] > 1, -tensor.stride(d)))


def _in_memory_order(tensor: Tensor) -> Tensor | None:
    """Return `tensor` permuted to a contiguous one, or None: it has gaps."""
    straight = tensor.permute(_dims_outside_in(tensor))
    return straight if straight.is_contiguous() else None


def _overlaps(tensor: Tensor) -> bool:
    """Whether values may share memory, as where one has been expanded: a copy would be larger."""
    reach = 0  # from the first to the last value of the inner dimensions
    for d in reversed(_dims_outside_in(tensor)):
        if tensor.shape[d] > 1:
            if tensor.stride(d) <= reach:
                return True
            reach += (tensor.shape[d] - 1) * tensor.stride(d)
    return False
