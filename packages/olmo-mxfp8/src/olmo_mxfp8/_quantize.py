"""`quantize` and `dequantize`: between ordinary tensors and MXFP8."""

import math

import torch

from . import _quantize_kernels, reference
from ._formats import (
    BLOCK,
    COARSE,
    FORMATS,
    Element,
    Granularity,
    ScaleRule,
    WeightGranularity,
    check_blocks,
    check_dim,
    check_element,
    check_granularity,
    check_scale_rule,
    check_source,
    check_weight_granularity,
)
from ._quantize_impl import Impl, pick
from ._tensor import MXTensor, check_quantized


def quantize(
    x: torch.Tensor,
    *,
    dim: int = -1,
    element: Element = "e4m3",
    scale_rule: ScaleRule = "rceil",
    granularity: Granularity = 32,
    impl: Impl = "auto",
) -> MXTensor:
    """Quantise `x` to MXFP8 along `dim`, exactly.

    A finite block keeps every value within half a step of its element format: with `rceil` the
    error is at most `max(|x| / 16, 2^-10 scale)` for E4M3 and `max(|x| / 8, 2^-17 scale)` for E5M2.
    Zeros keep their sign. A block with a NaN or an infinity becomes 32 NaN (scale 255, codes 0), so
    that neither can turn into an ordinary number. Blocks below the FP32 normals get scale 0 and are
    rounded like any other.

    Coarse scales are shared more widely, and each is written once for every 32 values all the same:
    the result is MXFP8 to any reader. The bounds above hold with the shared scale, which with
    `rceil` is at most 1/224 of the largest value that shares it: the error is at most
    `max(|x| / 16, 2^-17 largest)` for E4M3. A NaN or an infinity takes all that share its scale
    with it.

    Args:
        x: float32, bfloat16 or float16, any shape of at least one dimension.
        dim: The dimension along which values share a scale; a multiple of 32 long, of 128 for
            coarse scales. Use the contraction of the product that `x` goes into.
        element: `"e4m3"` (largest 448, 4 significant bits) or `"e5m2"` (57344, 3 bits).
        scale_rule: `"rceil"` takes the smallest scale with which the block fits; `"floor"`, the
            rule of the OCP specification, can be one lower and saturates the top of such a block.
        granularity: 32; or 128: four adjacent blocks share a scale; or `"128x128"`: tiles of the
            last two dimensions do, and quantising along either of the two gives the same codes.
            The product on Hopper's FP8 units takes 128 for rows, `"128x128"` for weights.
        impl: `"reference"` is plain torch, `"triton"` one kernel on CUDA of compute capability 8.0
            or newer, with the same bits. `"auto"` is `"triton"` on CUDA where that can run, because
            torch makes a dozen passes over memory, and `"reference"` everywhere else.

    Returns:
        Codes and scale bytes, contiguous. They carry no gradient; `mx_linear` is differentiable.

    Raises:
        TypeError: `x` has another dtype (float64 does not fit the range of the scales), or an
            argument another type.
        ValueError: `dim`, the length of `dim` or an option is out of range, or the named `impl`
            cannot run.
    """
    check_source("x", x)
    check_element("element", element)
    check_scale_rule(scale_rule)
    check_dim(dim)
    if x.ndim == 0:
        raise ValueError("`x` must have at least one dimension, got a scalar.")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"`dim` must be in [{-x.ndim}, {x.ndim}) for `x` of shape {tuple(x.shape)}, got {dim}."
        )
    dim %= x.ndim
    check_granularity("x", x.shape, dim, granularity)

    tiles = granularity == "128x128"
    if pick(impl, x.device):
        codes, scales = _quantize_kernels.quantize(
            x.detach(), dim, element, scale_rule == "rceil", COARSE if tiles else granularity, tiles
        )
        return MXTensor(codes.view(FORMATS[element].dtype), scales, dim, element, granularity)
    x = x.detach().resolve_neg().float().contiguous()  # read as bits, which lack a lazy sign
    if tiles:
        codes, scales = reference.quantize_tiles(x, FORMATS[element], scale_rule)
        # One byte for 128 x 128 values becomes one for 32 along `dim` and for each along the other.
        for each in (-2, -1):
            times = COARSE // BLOCK if each == dim - x.ndim else COARSE
            scales = scales.repeat_interleave(times, each)
    else:
        blocks = x.unflatten(dim, (x.shape[dim] // granularity, granularity))
        codes, scales = reference.quantize_blocks(blocks, dim, FORMATS[element], scale_rule)
        codes, scales = codes.view(x.shape), scales.repeat_interleave(granularity // BLOCK, dim)
    return MXTensor(codes.view(FORMATS[element].dtype), scales, dim, element, granularity)


def quantize_both(
    x_MK: torch.Tensor,
    *,
    element: Element = "e4m3",
    scale_rule: ScaleRule = "rceil",
    impl: Impl = "auto",
) -> tuple[MXTensor, MXTensor]:
    """Quantise a matrix along its rows and along its columns: `quantize` with `dim` 1 and 0.

    A training step needs both: the product with the weights contracts K, the gradient of the
    weights contracts M. The kernel reads the matrix once.

    Args:
        x_MK: float32, bfloat16 or float16, (M, K), both multiples of 32.
        element: As for `quantize`.
        scale_rule: As for `quantize`.
        impl: As for `quantize`.

    Returns:
        The matrix with scales along K, and the matrix with scales along M.

    Raises:
        TypeError: As for `quantize`.
        ValueError: `x_MK` is not a matrix, a size is not a multiple of 32, an option is out of
            range, or the named `impl` cannot run.
    """
    check_source("x_MK", x_MK)
    check_element("element", element)
    check_scale_rule(scale_rule)
    if x_MK.ndim != 2:
        raise ValueError(f"`x_MK` must have two dimensions, got shape {tuple(x_MK.shape)}.")
    for dim in (0, 1):
        check_blocks(f"`x_MK.shape[{dim}]`", x_MK.shape[dim], BLOCK)
    if not pick(impl, x_MK.device):
        rows, columns = (
            quantize(x_MK, dim=dim, element=element, scale_rule=scale_rule, impl="reference")
            for dim in (1, 0)
        )
        return rows, columns
    parts = _quantize_kernels.quantize_both(x_MK.detach(), element, scale_rule == "rceil")
    row_codes, row_scales, column_codes, column_scales = parts
    dtype = FORMATS[element].dtype
    return (
        MXTensor(row_codes.view(dtype), row_scales, 1, element),
        MXTensor(column_codes.view(dtype), column_scales, 0, element),
    )


def quantize_with_transpose(
    w: torch.Tensor,
    *,
    element: Element = "e4m3",
    scale_rule: ScaleRule = "rceil",
    granularity: WeightGranularity = 32,
    impl: Impl = "auto",
) -> tuple[MXTensor, MXTensor]:
    """Quantise a weight for its forward and its input gradient: `quantize` of `w` and of `w.mT`.

    The forward contracts D and the input gradient F, and products want the contraction last in
    memory: the second result is transposed. The kernel reads the weight once.

    Args:
        w: float32, bfloat16 or float16, `(.., F, D)`: a matrix or a stack of them. Both widths are
            multiples of 32, of 128 for `"128x128"`.
        element: As for `quantize`.
        scale_rule: As for `quantize`.
        granularity: 32; or `"128x128"`, where the codes are the same both ways.
        impl: As for `quantize`.

    Returns:
        `(.., F, D)` with scales along D, and `(.., D, F)` with scales along F; both contiguous,
        without gradient.

    Raises:
        TypeError: As for `quantize`.
        ValueError: `w` has fewer than two dimensions, a width is not a multiple of the
            granularity, an option is out of range, or the named `impl` cannot run.
    """
    check_source("w", w)
    check_element("element", element)
    check_scale_rule(scale_rule)
    check_weight_granularity(granularity)
    if w.ndim < 2:
        raise ValueError(f"`w` must be (.., F, D), got shape {tuple(w.shape)}.")
    last = w.ndim - 1
    for dim in (last, last - 1):
        check_granularity("w", w.shape, dim, granularity)
    if not pick(impl, w.device):
        straight, turned = (
            quantize(
                each,
                element=element,
                scale_rule=scale_rule,
                granularity=granularity,
                impl="reference",
            )
            for each in (w, w.mT)
        )
        return straight, turned
    *stack, F, D = w.shape
    parts = _quantize_kernels.quantize_with_transpose(
        w.detach().reshape(math.prod(stack), F, D),
        element,
        scale_rule == "rceil",
        granularity == "128x128",
    )
    codes, scales, turned_codes, turned_scales = (
        part.view(*stack, *part.shape[1:]) for part in parts
    )
    dtype = FORMATS[element].dtype
    return (
        MXTensor(codes.view(dtype), scales, last, element, granularity),
        MXTensor(turned_codes.view(dtype), turned_scales, last, element, granularity),
    )


def dequantize(
    t: MXTensor, dtype: torch.dtype = torch.float32, *, impl: Impl = "auto"
) -> torch.Tensor:
    """Return the values of `t`.

    Exact in float64, and in float32 but for 2^128 and beyond, which is infinite there. Of what
    `quantize` makes of finite input, only the largest numbers become that, and only with `rceil`,
    which rounds up to 2^128 what is at least 1.9375 * 2^127 (3.30e38) in E4M3 or 1.875 * 2^127
    (3.19e38) in E5M2. bfloat16 and float16 are the float32 values rounded once, to nearest even.

    Args:
        t: Any `MXTensor`.
        dtype: float32, bfloat16, float16 or float64.
        impl: As for `quantize`; float64 is the reference's alone.

    Returns:
        `dtype`, the shape of `t`, contiguous.

    Raises:
        TypeError: `dtype` is another one, or `t` no `MXTensor`.
        ValueError: The named `impl` cannot run.
    """
    check_quantized("t", t)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise TypeError(f"`dtype` must be float32, bfloat16, float16 or float64, got {dtype}.")
    reason = "its kernel computes in float32, not in float64" if dtype == torch.float64 else None
    if pick(impl, t.device, reason):
        return _quantize_kernels.dequantize(
            t.data.view(torch.uint8), t.scales, t.dim, t.element, dtype
        )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    blocks = t.data.unflatten(t.dim, (t.scales.shape[t.dim], BLOCK))
    values = reference.dequantize_blocks(blocks, t.scales, t.dim, wide)
    return values.flatten(t.dim, t.dim + 1).to(dtype)
