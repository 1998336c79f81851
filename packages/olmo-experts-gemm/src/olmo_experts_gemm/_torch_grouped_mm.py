"""The same two products through torch's own `grouped_mm`, which leaves three things to us.

- It takes dense operands with 16-byte aligned strides: anything else is copied here.
- It leaves the rows past the last offset uninitialised: they are overwritten with zeros, whatever
  they hold, in the output and in `dx`.
- Releases differ in what they leave in the weight gradient of an expert without rows
  (pytorch#172439): it is overwritten with zeros too.

Nothing here reads the device from the host. Overwriting costs one pass over the output.
"""

import torch
from torch import Tensor

from ._dense import ALIGNMENT_BYTES, copy, dense, is_dense

# torch 2.10 made the name public.
_torch_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm

_MAX_CUDA_EXPERTS = 1023
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_not(x_RD: Tensor, num_experts: int, *widths: int) -> str | None:
    """Say why torch's `grouped_mm` cannot multiply here, or return None when it can.

    Args:
        x_RD: The rows; their dtype and device count.
        num_experts: E.
        *widths: Every matrix width of the products, as inner or outer dimension.
    """
    dtype, device = x_RD.dtype, x_RD.device
    if device.type not in ("cpu", "cuda"):
        return f"it runs on CPU and CUDA, not on {device.type}"
    if dtype not in _DTYPES:
        return f"it multiplies bfloat16, float16 or float32, not {dtype}".replace("torch.", "")
    for width in widths:
        if width * dtype.itemsize % ALIGNMENT_BYTES:
            multiple = ALIGNMENT_BYTES // dtype.itemsize
            return f"every width must be a multiple of {multiple} (16 bytes), got {width}"
    return _why_not_cuda(dtype, device, num_experts) if device.type == "cuda" else None


def _why_not_cuda(dtype: torch.dtype, device: torch.device, num_experts: int) -> str | None:
    """Outside of these limits torch refuses, or loops over experts with a host sync a call."""
    capability = torch.cuda.get_device_capability(device)
    if torch.version.cuda is None or capability[0] not in (9, 10):
        return f"its CUDA kernel needs compute capability 9.x or 10.x, this device has {capability}"
    if dtype is not torch.bfloat16:
        return f"its CUDA kernel multiplies bfloat16, not {dtype}".replace("torch.", "")
    if num_experts > _MAX_CUDA_EXPERTS:
        return f"its CUDA kernel takes up to {_MAX_CUDA_EXPERTS} experts, got {num_experts}"
    return None


def grouped_mm(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """Multiply each expert's rows by its weights; rows past the last offset become zero."""
    if x_RD.numel() == 0 or w_EFD.numel() == 0:  # some releases fail to launch on nothing
        return x_RD.new_zeros(x_RD.shape[0], w_EFD.shape[1])
    # Either dimension of a weight may be the inner one, so the `w.mT` of a backward is not copied.
    w_EFD = w_EFD if is_dense(w_EFD) or is_dense(w_EFD.mT) else copy(w_EFD)
    y_RF = _torch_grouped_mm(dense(x_RD), w_EFD.mT, offs=offsets_E)
    rows_R = torch.arange(y_RF.shape[0], device=y_RF.device)
    return _overwrite(y_RF, (rows_R >= offsets_E[-1])[:, None])


def grouped_outer(dy_RF: Tensor, x_RD: Tensor, offsets_E: Tensor) -> Tensor:
    """Sum the outer products of each expert's rows, (E, F, D); an expert without rows gets zero."""
    if dy_RF.numel() == 0 or x_RD.numel() == 0:
        return dy_RF.new_zeros(offsets_E.shape[0], dy_RF.shape[1], x_RD.shape[1])
    dw_EFD = _torch_grouped_mm(dense(dy_RF).t(), dense(x_RD), offs=offsets_E)
    counts_E = offsets_E.diff(prepend=offsets_E.new_zeros(1))
    return _overwrite(dw_EFD, (counts_E == 0)[:, None, None])


def _overwrite(tensor: Tensor, where: Tensor) -> Tensor:
    # As elements of 16 bytes: a masked fill of 2-byte elements is far from the speed of a copy.
    tensor.view(torch.complex128).masked_fill_(where, 0)
    return tensor
