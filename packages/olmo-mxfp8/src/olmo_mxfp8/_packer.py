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
    check_blocks,
    check_element,
    check_row_granularity,
    check_scale_rule,
    check_source,
)
from ._quantize import dequantize, quantize
from ._saved_tensors import SelectingHooks
from ._tensor import MXTensor
from ._uncompiled import uncompiled

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
            ValueError: Its last dimension is not a multiple of the granularity, or it has none.
        """
        check_source("tensor", tensor)
        if tensor.ndim == 0:
            raise ValueError("`tensor` must have rows to quantise along, got a scalar.")
        check_blocks("`tensor.shape[-1]`", tensor.shape[-1], self.granularity)
        values = quantize(
            tensor,
            element=self.element,
            scale_rule=self.scale_rule,
            granularity=self.granularity,
        )
        return PackedActivation(values, tensor.dtype)

    @uncompiled(reason="what autograd saves is chosen on the host")
    def saved_tensors(
        self,
        *,
        select: Callable[[Tensor], bool] | None = None,
        min_numel: int = DEFAULT_MIN_NUMEL,
    ) -> saved_tensors_hooks:
        """Return a context in which autograd saves activations in MXFP8, and all else as it is.

        An activation is what an operation has computed and a gradient flows through: dense, in
        float32, bfloat16 or float16, of at least `min_numel` values, its last dimension a multiple
        of the granularity. Never rounded are leaves, which something holds in any case: parameters,
        inputs, and all that needs no gradient, such as frozen weights and what autocast makes of
        them; views of leaves and copies, in other dtypes too, one by one or joined; tensor
        subclasses; and what has been expanded. A parameter with other values than its own, a
        scaled or padded one, is computed and so an activation.

        An activation that several operations save is held once, as are reshapes and permutations
        of all of it that keep its rows in whole blocks; a part of it has a copy of its own.

        The forward is what it was, and the gradients are those of the rounded activations. The
        memory of an activation is free once nothing else holds it.

        Args:
            select: Says of an activation whether to round it; None: each.
            min_numel: The number of values from which on it applies.

        Returns:
            A context manager: `with packer.saved_tensors(): y = layer(x)`. Backward may run
            outside.

        Raises:
            TypeError: `select` cannot be called, or `min_numel` is no int.
            ValueError: `min_numel` is below 1.

        Note:
            An exponential turns an error into a factor. Leave out what is saved to be
            exponentiated, as the log-probabilities of a cross-entropy: by a context around the
            layers that multiply, or by `select`.

            A write that does not raise a version (`WeightCache` names them) is not seen. To an
            input, which is kept as torch keeps it, it does what it does without this context. An
            activation stays as it was when an operation first saved it.

            What a custom function makes in its forward and saves needs no gradient, and is left;
            of a function that `torch.compile` has compiled that is all but its inputs. Inside
            one, a call breaks the graph, and `fullgraph=True` refuses it.

            `torch.utils.checkpoint` saves its inputs, and recomputes from the rounded ones.
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

        With `rceil` the largest numbers of a dtype come back infinite. In float16 those are 63488
        and more in E4M3, 61440 and more in E5M2; for the others see `dequantize`.

        Raises:
            TypeError: `packed` is not what `pack` has returned.
        """
        if not isinstance(packed, PackedActivation):
            raise TypeError(f"`packed` must be what `pack` returned, got {type(packed).__name__}.")
        return dequantize(packed.values, packed.dtype)
