"""The kernels that quantise and dequantise as torch operators.

`torch.compile` takes each as a single node. Codes and scales are uint8 here. A tensor without
values launches nothing.
"""

from typing import cast

import torch
from torch import Tensor

from ._formats import BLOCK, FORMATS, Element, Format


@torch.library.custom_op("olmo_mxfp8::quantize", mutates_args=())
def quantize(
    x: Tensor, dim: int, element: str, rceil: bool, granularity: int, tiles: bool
) -> tuple[Tensor, Tensor]:
    """Return codes and scale bytes along `dim`, packed."""
    from ._triton import quantize as kernels

    if x.numel() == 0:
        return _quantized(x, dim)
    with torch.cuda.device_of(x):
        if tiles:
            return kernels.quantize_tiles(x.contiguous(), dim, element_format(element), rceil=rceil)
        return kernels.quantize(
            x.contiguous(), dim, element_format(element), rceil=rceil, granularity=granularity
        )


@torch.library.custom_op("olmo_mxfp8::quantize_both", mutates_args=())
def quantize_both(x_MK: Tensor, element: str, rceil: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales along K, then those along M, packed."""
    from ._triton import quantize as kernels

    if x_MK.numel() == 0:
        return *_quantized(x_MK, 1), *_quantized(x_MK, 0)
    with torch.cuda.device_of(x_MK):
        return kernels.quantize_both(x_MK.contiguous(), element_format(element), rceil=rceil)


@torch.library.custom_op("olmo_mxfp8::quantize_with_transpose", mutates_args=())
def quantize_with_transpose(
    w_EFD: Tensor, element: str, rceil: bool, tiles: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales of matrices along D, then those of their transposes, packed."""
    from ._triton import quantize_transpose as kernels

    if w_EFD.numel() == 0:
        return *_quantized(w_EFD, 2), *_quantized(w_EFD.mT, 2)
    with torch.cuda.device_of(w_EFD):
        return kernels.quantize_with_transpose(
            w_EFD.contiguous(), element_format(element), rceil=rceil, tiles=tiles
        )


@torch.library.custom_op("olmo_mxfp8::dequantize", mutates_args=())
def dequantize(codes: Tensor, scales: Tensor, dim: int, element: str, dtype: torch.dtype) -> Tensor:
    """Return the values, packed."""
    from ._triton import dequantize as kernels

    if codes.numel() == 0:
        return codes.new_empty(codes.shape, dtype=dtype)
    with torch.cuda.device_of(codes):
        return kernels.dequantize(
            codes.contiguous(), scales.contiguous(), dim, element_format(element), dtype
        )


@torch.library.custom_op("olmo_mxfp8::dequantize_rows", mutates_args=())
def dequantize_rows(
    codes: Tensor, scales: Tensor, rows_R: Tensor, element: str, dtype: torch.dtype
) -> Tensor:
    """Return the values of chosen rows, packed; zeros where `rows_R` is -1."""
    from ._triton import dequantize_rows as kernels

    if codes.numel() == 0 or rows_R.numel() == 0:
        return codes.new_zeros(rows_R.numel(), codes.shape[1], dtype=dtype)
    with torch.cuda.device_of(codes):
        return kernels.dequantize_rows(
            codes.contiguous(),
            scales.contiguous(),
            rows_R.contiguous(),
            element_format(element),
            dtype,
        )


@torch.library.custom_op("olmo_mxfp8::weighted_quantize", mutates_args=())
def weighted_quantize(
    x_RD: Tensor, weights_R: Tensor, element: str, rceil: bool, granularity: int
) -> tuple[Tensor, Tensor]:
    """Return codes and scale bytes of rows times their weights along D, packed."""
    from ._triton import quantize as kernels

    if x_RD.numel() == 0:
        return _quantized(x_RD, 1)
    with torch.cuda.device_of(x_RD):
        return kernels.quantize(
            x_RD.contiguous(),
            1,
            element_format(element),
            rceil=rceil,
            granularity=granularity,
            weights_R=weights_R.contiguous(),
        )


@torch.library.custom_op("olmo_mxfp8::swiglu_quantize", mutates_args=())
def swiglu_quantize(
    hidden_R2H: Tensor, weights_R: Tensor | None, element: str, rceil: bool, granularity: int
) -> tuple[Tensor, Tensor]:
    """Return codes and scale bytes of the activation along its last dimension, packed."""
    from ._triton import swiglu as kernels

    if hidden_R2H.numel() == 0:
        return _quantized(hidden_R2H[:, : hidden_R2H.shape[1] // 2], 1)
    with torch.cuda.device_of(hidden_R2H):
        return kernels.swiglu_quantize(
            hidden_R2H.contiguous(),
            None if weights_R is None else weights_R.contiguous(),
            element_format(element),
            rceil=rceil,
            granularity=granularity,
        )


@torch.library.custom_op("olmo_mxfp8::swiglu_quantize_backward", mutates_args=())
def swiglu_quantize_backward(
    d_act_RH: Tensor,
    hidden_R2H: Tensor,
    weights_R: Tensor | None,
    element: str,
    rceil: bool,
    granularity: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes and scale bytes of the gradient of `hidden`, and parts of that of `weights`.

    The parts, (R, H / granularity), are unwritten without weights.
    """
    from ._triton import swiglu as kernels

    if d_act_RH.numel() == 0:
        parts = _weight_parts(d_act_RH, granularity)
        return *_quantized(hidden_R2H, 1), parts.zero_()
    with torch.cuda.device_of(d_act_RH):
        return kernels.swiglu_quantize_backward(
            d_act_RH.contiguous(),
            hidden_R2H.contiguous(),
            None if weights_R is None else weights_R.contiguous(),
            element_format(element),
            rceil=rceil,
            granularity=granularity,
        )


def element_format(element: str) -> Format:
    """Return the format of a name."""
    # The schema of an operator has strings, not literals.
    return FORMATS[cast(Element, element)]


def _quantized(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    shape = list(x.shape)
    shape[dim] //= BLOCK
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(shape, dtype=torch.uint8)


def _weight_parts(d_act_RH: Tensor, granularity: int) -> Tensor:
    R, H = d_act_RH.shape
    return d_act_RH.new_empty(R, H // granularity, dtype=torch.float32)


@quantize.register_fake
def _(
    x: Tensor, dim: int, element: str, rceil: bool, granularity: int, tiles: bool
) -> tuple[Tensor, Tensor]:
    return _quantized(x, dim)


@quantize_both.register_fake
def _(x_MK: Tensor, element: str, rceil: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_quantized(x_MK, 1), *_quantized(x_MK, 0)


@quantize_with_transpose.register_fake
def _(
    w_EFD: Tensor, element: str, rceil: bool, tiles: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_quantized(w_EFD, 2), *_quantized(w_EFD.mT, 2)


@dequantize.register_fake
def _(codes: Tensor, scales: Tensor, dim: int, element: str, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


@weighted_quantize.register_fake
def _(
    x_RD: Tensor, weights_R: Tensor, element: str, rceil: bool, granularity: int
) -> tuple[Tensor, Tensor]:
    return _quantized(x_RD, 1)


@swiglu_quantize.register_fake
def _(
    hidden_R2H: Tensor, weights_R: Tensor | None, element: str, rceil: bool, granularity: int
) -> tuple[Tensor, Tensor]:
    return _quantized(hidden_R2H[:, : hidden_R2H.shape[1] // 2], 1)


@swiglu_quantize_backward.register_fake
def _(
    d_act_RH: Tensor,
    hidden_R2H: Tensor,
    weights_R: Tensor | None,
    element: str,
    rceil: bool,
    granularity: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return *_quantized(hidden_R2H, 1), _weight_parts(d_act_RH, granularity)


@dequantize_rows.register_fake
def _(codes: Tensor, scales: Tensor, rows_R: Tensor, element: str, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(rows_R.shape[0], codes.shape[1], dtype=dtype)
