"""The products of the Triton kernels as torch operators, and what they can take.

Nothing here reads the device from the host. An operand that has gaps or is not aligned is copied.
"""

from functools import cache
from importlib.metadata import version

import torch
from torch import Tensor

from ._quantize_impl import why_no_kernel
from ._quantize_kernels import element_format

_ALIGNMENT = 16  # bytes, of what a descriptor describes
_MAX_EXPERTS = 512
_MAX_ROWS = 2**30


def why_not(device: torch.device, num_rows: int, num_experts: int, num_columns: int) -> str | None:
    """Say why no kernel can multiply here, or return None when the plain one can."""
    reason = why_no_kernel(device.type, device.index)
    if reason is None and num_columns % 8:
        reason = f"the output width must be a multiple of 8, got {num_columns}"
    if reason is None and num_experts > _MAX_EXPERTS:
        reason = f"it takes up to {_MAX_EXPERTS} experts, got {num_experts}"
    if reason is None and num_rows >= _MAX_ROWS:
        reason = f"it takes fewer than 2^30 rows, got {num_rows}"
    return reason


def why_not_generation(index: int | None, *wanted: int) -> str | None:
    """Say why the major compute capability of a CUDA device is none of `wanted`, or return None."""
    capability = torch.cuda.get_device_capability(index)
    if capability[0] in wanted:
        return None
    names = " or ".join(f"{major}.x" for major in wanted)
    return f"it is for compute capability {names}, this device has {capability}"


def why_not_gluon() -> str | None:
    """Say why Gluon kernels cannot be compiled, or return None when they can."""
    found = _triton_version()
    if tuple(int(part) for part in found.split(".")[:2]) >= (3, 6):
        return None
    return f"it needs triton 3.6 or newer, this is {found}"


@cache
def _triton_version() -> str:
    # Read from a file, which would take longer than a small product.
    return version("triton")


# As with `why_no_kernel`: a constant of a compiled graph.
for _constant in (why_not_generation, why_not_gluon):
    _constant._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess] # what torch.compiler.assume_constant_result sets, without importing the compiler


@torch.library.custom_op("olmo_mxfp8::row_product", mutates_args=())
def row_product(a_RK: Tensor, b_ENK: Tensor, offsets_E: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return `a @ b[e].T` of ordinary operands of one dtype; rows past the last offset are 0."""
    from ._triton.row_product import row_product as kernel

    if a_RK.numel() == 0 or b_ENK.numel() == 0:
        return a_RK.new_zeros(a_RK.shape[0], b_ENK.shape[1], dtype=out_dtype)
    with torch.cuda.device_of(a_RK):
        return kernel(_dense(a_RK), _dense(b_ENK), offsets_E.contiguous(), out_dtype)


@torch.library.custom_op("olmo_mxfp8::scaled_row_product", mutates_args=())
def scaled_row_product(
    a_RK: Tensor,
    a_scales: Tensor,
    a_element: str,
    b_ENK: Tensor,
    b_scales: Tensor,
    b_element: str,
    offsets_E: Tensor,
    out_dtype: torch.dtype,
    coarse: bool,
) -> Tensor:
    """Return `a @ b[e].T` of codes, uint8, under scale bytes; rows past the last offset are 0.

    With `coarse` the scales are equal in fours in `a_RK` and over tiles of 128 x 128 in `b_ENK`.
    """
    if a_RK.numel() == 0 or b_ENK.numel() == 0:
        return a_RK.new_zeros(a_RK.shape[0], b_ENK.shape[1], dtype=out_dtype)
    a = _dense(a_RK).view(element_format(a_element).dtype)
    b = _dense(b_ENK).view(element_format(b_element).dtype)
    a_scales, b_scales = a_scales.contiguous(), b_scales.contiguous()
    offsets_E = offsets_E.contiguous()
    with torch.cuda.device_of(a_RK):
        if coarse:
            from ._triton.coarse_product import coarse_product

            return coarse_product(a, a_scales, b, b_scales, offsets_E, out_dtype)
        from ._triton.row_product import row_product as kernel

        scales = {"a_scales": a_scales, "b_scales": b_scales}
        return kernel(a, b, offsets_E, out_dtype, kind="native", **scales)


@torch.library.custom_op("olmo_mxfp8::outer_product", mutates_args=())
def outer_product(a_RN: Tensor, b_RK: Tensor, offsets_E: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return `a.T @ b` over the rows of each expert, (E, N, K)."""
    from ._triton.outer_product import outer_product as kernel

    if a_RN.numel() == 0 or b_RK.numel() == 0:
        shape = (offsets_E.numel(), a_RN.shape[1], b_RK.shape[1])
        return a_RN.new_zeros(shape, dtype=out_dtype)
    with torch.cuda.device_of(a_RN):
        return kernel(_dense(a_RN), _dense(b_RK), offsets_E.contiguous(), out_dtype)


def _dense(tensor: Tensor) -> Tensor:
    # `is_contiguous` ignores the strides of dimensions of size 1; a descriptor does not.
    strides = [1]
    for size in reversed(tensor.shape[1:]):
        strides.insert(0, strides[0] * size)
    if list(tensor.stride()) == strides and tensor.data_ptr() % _ALIGNMENT == 0:
        return tensor
    return tensor.new_empty(tensor.shape).copy_(tensor)


@row_product.register_fake
def _(a_RK: Tensor, b_ENK: Tensor, offsets_E: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a_RK.new_empty(a_RK.shape[0], b_ENK.shape[1], dtype=out_dtype)


@scaled_row_product.register_fake
def _(
    a_RK: Tensor,
    a_scales: Tensor,
    a_element: str,
    b_ENK: Tensor,
    b_scales: Tensor,
    b_element: str,
    offsets_E: Tensor,
    out_dtype: torch.dtype,
    coarse: bool,
) -> Tensor:
    return a_RK.new_empty(a_RK.shape[0], b_ENK.shape[1], dtype=out_dtype)


@outer_product.register_fake
def _(a_RN: Tensor, b_RK: Tensor, offsets_E: Tensor, out_dtype: torch.dtype) -> Tensor:
    shape = (offsets_E.shape[0], a_RN.shape[1], b_RK.shape[1])
    return a_RN.new_empty(shape, dtype=out_dtype)
