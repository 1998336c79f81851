"""The value that quantised code passes around: element codes and their scale bytes."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from ._formats import (
    BLOCK,
    FORMATS,
    Element,
    Granularity,
    check_dim,
    check_element,
    check_granularity,
    check_tensor,
)


@dataclass(frozen=True, slots=True, eq=False)
class MXTensor:
    """A tensor in MXFP8: along `dim`, each run of 32 elements shares one power-of-two scale.

    The value of an element is `data * 2^(scale - 127)`; a scale byte of 255 makes all of its 32
    values NaN. It takes 33/32 bytes a value. `copy`, `pickle` and `torch.save` take it, and
    `torch.load` with `weights_only=False`; `MXTensor(t.data, t.scales, ..)` needs no trust.

    Args:
        data: Element codes, `torch.float8_e4m3fn` or `torch.float8_e5m2`, any shape.
        scales: `torch.uint8`, the shape of `data` with `dim` divided by 32.
        dim: The dimension along which values share scales, in `[0, data.ndim)`.
        element: The format of `data`, `"e4m3"` or `"e5m2"`.
        granularity: What is known of equal scales: nothing (32), that they are equal in fours (128)
            or over tiles of 128 x 128. It says which products can run and changes no value; a
            caller who sets it vouches for it.

    Raises:
        ValueError: `element`, `granularity`, `dim` or the shape or device of `scales` does not fit
            `data`.
        TypeError: `data` or `scales` has another dtype, or an argument another type.
    """

    data: torch.Tensor
    scales: torch.Tensor
    dim: int
    element: Element
    granularity: Granularity = 32

    def __post_init__(self) -> None:
        check_tensor("data", self.data)
        check_tensor("scales", self.scales)
        check_element("element", self.element)
        check_dim(self.dim)
        expected = FORMATS[self.element].dtype
        if self.data.dtype != expected:
            raise TypeError(
                f"`data` must be {expected} for element {self.element!r}, got {self.data.dtype}."
            )
        if self.scales.dtype != torch.uint8:
            raise TypeError(
                f"`scales` must be torch.uint8, got {self.scales.dtype}; "
                f"call `.view(torch.uint8)` on a tensor of E8M0 scales."
            )
        if not 0 <= self.dim < self.data.ndim:
            raise ValueError(f"`dim` must be in [0, {self.data.ndim}), got {self.dim}.")
        shape = list(self.data.shape)
        shape[self.dim], rest = divmod(shape[self.dim], BLOCK)
        if rest or list(self.scales.shape) != shape:
            raise ValueError(
                f"`scales` must hold one byte for each {BLOCK} values along `dim`={self.dim} of "
                f"`data` {tuple(self.data.shape)}, got {tuple(self.scales.shape)}."
            )
        if self.scales.device != self.data.device:
            raise ValueError(
                f"`scales` must be on the device of `data`, {self.data.device}, got "
                f"{self.scales.device}."
            )
        check_granularity("data", self.data.shape, self.dim, self.granularity)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts, with the codes as bytes: `pickle` cannot load torch's FP8 tensors."""
        codes = self.data.view(torch.uint8)
        return _from_codes, (codes, self.scales, self.dim, self.element, self.granularity)

    @property
    def shape(self) -> torch.Size:
        """The shape of the values."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        """Where the codes and scales live."""
        return self.data.device

    def to(self, device: torch.device | str) -> "MXTensor":
        """Return the same values on `device`."""
        return replace(self, data=self.data.to(device), scales=self.scales.to(device))


def _from_codes(
    codes: torch.Tensor, scales: torch.Tensor, dim: int, element: Element, granularity: Granularity
) -> MXTensor:
    return MXTensor(codes.view(FORMATS[element].dtype), scales, dim, element, granularity)


def check_quantized(name: str, value: object) -> None:
    """Raise `TypeError` unless `value` is an `MXTensor`."""
    if not isinstance(value, MXTensor):
        raise TypeError(
            f"`{name}` must be an MXTensor, got {type(value).__name__}; `quantize` makes one of a "
            f"tensor."
        )
