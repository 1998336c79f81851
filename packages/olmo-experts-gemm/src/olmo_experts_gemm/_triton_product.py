"""The same two products through the Triton kernels of this package.

This module imports no triton: the kernels are imported where one is launched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor

from ._dense import dense, is_dense

_MULTIPLE = 8
_MAX_EXPERTS = 512
MAX_ROWS = 2**30
"""What a descriptor of ragged rows can address, `_triton.ragged.MAX_ROWS`."""


def why_not(x: Tensor, num_rows: int, num_experts: int, *widths: int) -> str | None:
    """Say why the kernels cannot run here, or return None when they can.

    Args:
        x: The rows or tokens; their dtype and device count.
        num_rows: R.
        num_experts: E.
        *widths: Every matrix width of the products, as inner or outer dimension.
    """
    reason = _why_not_device(x.device.type, x.device.index, str(x.dtype).removeprefix("torch."))
    if reason:
        return reason
    for width in widths:
        if width % _MULTIPLE or width == 0:
            return f"every width must be a positive multiple of {_MULTIPLE}, got {width}"
    if num_experts > _MAX_EXPERTS:
        return f"it takes up to {_MAX_EXPERTS} experts, got {num_experts}"
    if num_rows >= MAX_ROWS:
        return f"it takes fewer than 2^30 rows, got {num_rows}"
    return None


def _why_not_device(device: str, index: int | None, dtype: str) -> str | None:
    if device not in ("cpu", "cuda"):
        return f"it runs on CUDA, not on {device}"
    if find_spec("triton") is None:
        return "triton is not installed here (pip install triton, on Linux)"
    if device == "cpu":
        from triton import knobs

        if not knobs.runtime.interpret:
            return "it runs on CUDA, and on CPU only in Triton's interpreter"
        dtypes = ("float16", "float32")
    else:
        capability = torch.cuda.get_device_capability(index)
        if torch.version.cuda is None or capability < (8, 0):
            return f"it needs CUDA of compute capability 8.0 or newer, this device has {capability}"
        dtypes = ("bfloat16", "float16")
    if dtype not in dtypes:
        return f"it multiplies {' or '.join(dtypes)} here, not {dtype}"
    return None


# What the machine can do is a constant of a compiled graph: a tracer cannot follow `find_spec`.
_why_not_device._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess] # what torch.compiler.assume_constant_result sets, without importing the compiler


@contextmanager
def launching_on(device: torch.device) -> Iterator[None]:
    """Launch on the device of the tensors, whichever is current."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        yield


def grouped_mm(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """Multiply each expert's rows by its weights; rows past the last offset become zero."""
    from ._triton.row_product import row_product

    if x_RD.numel() == 0 or w_EFD.numel() == 0:
        return x_RD.new_zeros(x_RD.shape[0], w_EFD.shape[1])
    # Either dimension of a weight may be the inner one, so the `w.mT` of a backward is not copied.
    transposed = not is_dense(w_EFD) and is_dense(w_EFD.mT)
    w = w_EFD.mT if transposed else dense(w_EFD)
    with launching_on(x_RD.device):
        return row_product(dense(x_RD), w, dense(offsets_E), transposed=transposed)


def grouped_outer(dy_RF: Tensor, x_RD: Tensor, offsets_E: Tensor) -> Tensor:
    """Sum the outer products of each expert's rows, (E, F, D); an expert without rows gets zero."""
    from ._triton.weight_gradient import weight_gradient

    if dy_RF.numel() == 0 or x_RD.numel() == 0:
        return dy_RF.new_zeros(offsets_E.shape[0], dy_RF.shape[1], x_RD.shape[1])
    with launching_on(x_RD.device):
        return weight_gradient(dense(dy_RF), dense(x_RD), dense(offsets_E))


def add_grouped_outer(into_EFD: Tensor, dy_RF: Tensor, x_RD: Tensor, offsets_E: Tensor) -> None:
    """Add `grouped_outer` to a float32 tensor, unrounded where that lies as a kernel needs it."""
    from ._triton.weight_gradient import weight_gradient

    if dy_RF.numel() == 0 or x_RD.numel() == 0:
        return
    with launching_on(x_RD.device):
        operands = dense(dy_RF), dense(x_RD), dense(offsets_E)
        if is_dense(into_EFD):
            weight_gradient(*operands, into=into_EFD)
        else:
            into_EFD.add_(weight_gradient(*operands))
