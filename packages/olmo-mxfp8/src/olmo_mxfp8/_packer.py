"""`MXPacker`: activations that wait for their backward, kept in MXFP8.

It has the two methods that a layer asks of a packer, `pack` and `unpack`: an expert layer of
olmo-experts-gemm takes one as `pack=MXPacker()`. They round whatever they are given. Around other
layers, where autograd saves more than activations, `saved_tensors` chooses. The forward computes
with the activation itself; only the gradients see the rounded copy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ._formats import (
    Element,
    RowGranularity,
    ScaleRule,
    check_element,
    check_row_granularity,
    check_scale_rule,
)
from ._quantize import dequantize, quantize
from ._saved_tensors import SelectingHooks
from ._tensor import MXTensor

DEFAULT_MIN_NUMEL = 2**16
"""Values of an activation whose bytes are worth two launches."""


class PackedActivation(NamedTuple):
    """What is held in place of an activation."""

    values: MXTensor
    """Quantised along the last dimension."""
    dtype: torch.dtype
    """Of the activation."""

    @property
    def nbytes(self) -> int:
        """What it takes: 33/32 bytes a value."""
        return self.values.data.nbytes + self.values.scales.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MXPacker:
    """Keeps activations in MXFP8, 33/32 bytes a value, each row in blocks of its own.

    Rows are independent: what a row holds that nobody reads, also NaN, spoils no other.

    Args:
        element: As for `quantize`.
        scale_rule: As for `quantize`.
        granularity: 32, or 128: four adjacent blocks share a scale.

    Raises:
        ValueError: A field is not one of its choices.
    """

    element: Element = "e4m3"
    scale_rule: ScaleRule = "rceil"
    granularity: RowGranularity = 32

    def __post_init__(self) -> None:
        check_element("element", self.element)
        check_scale_rule(self.scale_rule)
        check_row_granularity(self.granularity)

    def pack(self, tensor: Tensor, /) -> PackedActivation:
        """Return `tensor`, float32, bfloat16 or float16 of any strides, quantised along its rows.

        Raises:
            TypeError: `tensor` has another dtype.
            ValueError: Its last dimension is not a multiple of the granularity.
        """
        values = quantize(
            tensor,
            element=self.element,
            scale_rule=self.scale_rule,
            granularity=self.granularity,
        )
        return PackedActivation(values, tensor.dtype)

    def saved_tensors(
        self,
        *,
        select: Callable[[Tensor], bool] | None = None,
        min_numel: int = DEFAULT_MIN_NUMEL,
    ) -> saved_tensors_hooks:
        """Return a context in which autograd saves activations in MXFP8, and all else as it is.

        An activation is a dense float32, bfloat16 or float16 tensor of at least `min_numel` values
        whose last dimension is a multiple of the granularity. Never rounded are parameters, views
        of them and copies of them in another dtype, as autocast makes; tensor subclasses; and what
        has been expanded. What several operations save, views of it too, is held once.

        The forward is what it was, and the gradients are those of the rounded activations. The
        memory of an activation is free once nothing else holds it.

        Args:
            select: Says of a tensor to which the rule applies whether to round it; None: each.
            min_numel: The number of values from which on it applies.

        Returns:
            A context manager: `with packer.saved_tensors(): y = layer(x)`. Backward may run
            outside.

        Raises:
            TypeError: `select` cannot be called, or `min_numel` is no int.
            ValueError: `min_numel` is below 1.

        Note:
            An exponential turns an error into a factor. Leave out what is saved to be
            exponentiated, the log-probabilities of a cross-entropy and the log-sum-exp of
            attention: by a context around the layers that multiply, or by `select`.

            A weight that was detached from its parameter (`.detach()`, `.data`) is not known as
            one. `torch.utils.checkpoint` saves its inputs, and recomputes from the rounded ones.
        """
        if select is not None and not callable(select):
            raise TypeError(f"`select` must be a function of a tensor or None, got {select!r}.")
        if not isinstance(min_numel, int):
            raise TypeError(f"`min_numel` must be an int, got {min_numel!r}.")
        if min_numel < 1:
            raise ValueError(f"`min_numel` must be at least 1, got {min_numel}.")
        hooks = SelectingHooks(
            self.pack, self.unpack, block=self.granularity, min_numel=min_numel, select=select
        )
        return saved_tensors_hooks(hooks.pack, hooks.unpack)

    def unpack(self, packed: PackedActivation, /) -> Tensor:
        """Return the rounded activation, contiguous, in the dtype it had.

        In float16, values beyond 61440 may come back infinite: they round to 65536.
        """
        return dequantize(packed.values, packed.dtype)
