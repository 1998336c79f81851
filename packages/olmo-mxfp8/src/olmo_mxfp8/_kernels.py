"""The Triton kernels as torch operators, which `torch.compile` takes as single nodes.

Codes and scales are uint8 here. A tensor without values launches nothing.
"""

from typing import cast

import torch
from torch import Tensor

from ._formats import BLOCK, FORMATS, Element, Format


@torch.library.custom_op("olmo_mxfp8::quantize", mutates_args=())
def quantize(
    x: Tensor, dim: int, element: str, rceil: bool, granularity: int
) -> tuple[Tensor, Tensor]:
    """Return codes and scale bytes along `dim`, packed."""
    from ._triton import quantize as kernels

    if x.numel() == 0:
        return _quantized(x, dim)
    with torch.cuda.device_of(x):
        return kernels.quantize(
            x.contiguous(), dim, _format(element), rceil=rceil, granularity=granularity
        )


@torch.library.custom_op("olmo_mxfp8::quantize_both", mutates_args=())
def quantize_both(x_MK: Tensor, element: str, rceil: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales along K, then those along M, packed."""
    from ._triton import quantize as kernels

    if x_MK.numel() == 0:
        return *_quantized(x_MK, 1), *_quantized(x_MK, 0)
    with torch.cuda.device_of(x_MK):
        return kernels.quantize_both(x_MK.contiguous(), _format(element), rceil=rceil)


@torch.library.custom_op("olmo_mxfp8::dequantize", mutates_args=())
def dequantize(codes: Tensor, scales: Tensor, dim: int, element: str, dtype: torch.dtype) -> Tensor:
    """Return the values, packed."""
    from ._triton import dequantize as kernels

    if codes.numel() == 0:
        return codes.new_empty(codes.shape, dtype=dtype)
    with torch.cuda.device_of(codes):
        return kernels.dequantize(
            codes.contiguous(), scales.contiguous(), dim, _format(element), dtype
        )


def _format(element: str) -> Format:
    # The schema of an operator has strings, not literals.
    return FORMATS[cast(Element, element)]


def _quantized(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    shape = list(x.shape)
    shape[dim] //= BLOCK
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(shape, dtype=torch.uint8)


@quantize.register_fake
def _(x: Tensor, dim: int, element: str, rceil: bool, granularity: int) -> tuple[Tensor, Tensor]:
    return _quantized(x, dim)


@quantize_both.register_fake
def _(x_MK: Tensor, element: str, rceil: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_quantized(x_MK, 1), *_quantized(x_MK, 0)


@dequantize.register_fake
def _(codes: Tensor, scales: Tensor, dim: int, element: str, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)
