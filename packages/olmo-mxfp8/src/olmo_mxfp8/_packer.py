"""`MXPacker`: activations that wait for their backward, kept in MXFP8.

It has the two methods that a layer asks of a packer, `pack` and `unpack`, and nothing else: an
expert layer of olmo-experts-gemm takes one as `pack=MXPacker()`. The forward computes with the
activation itself; only the gradients see the rounded copy.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ._formats import (
    Element,
    RowGranularity,
    ScaleRule,
    check_element,
    check_row_granularity,
    check_scale_rule,
)
from ._quantize import dequantize, quantize
from ._tensor import MXTensor


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

    def unpack(self, packed: PackedActivation, /) -> Tensor:
        """Return the rounded activation, contiguous, in the dtype it had.

        In float16, values beyond 61440 may come back infinite: they round to 65536.
        """
        return dequantize(packed.values, packed.dtype)
