"""`dequantize_rows`: the values of chosen rows, in the pass that moves them anyway.

A permutation in BF16 reads and writes two bytes a value; this one reads 33/32.

Shapes: T rows there are, R rows that are chosen, K columns.
"""

import torch
from torch import Tensor

from . import _quantize_kernels
from ._formats import check_tensor
from ._quantize import dequantize
from ._quantize_impl import Impl, pick
from ._tensor import MXTensor, check_quantized


def dequantize_rows(
    t: MXTensor, rows_R: Tensor, dtype: torch.dtype = torch.bfloat16, *, impl: Impl = "auto"
) -> Tensor:
    """Return the values of the rows `rows_R` of `t`, one after another.

    Args:
        t: `(T, K)`, quantised along K.
        rows_R: int32 or int64, `(R,)`, each in [-1, T); -1 gives a row of zeros. Rows may repeat.
        dtype: float32, bfloat16 or float16.
        impl: `"reference"` is plain torch; `"triton"` one kernel, as for `quantize`, with the same
            bits. `"auto"` is `"triton"` on CUDA, else `"reference"`.

    Returns:
        `dtype`, `(R, K)`; bfloat16 and float16 are the float32 values rounded once.

    Raises:
        TypeError: A dtype or a type is not as above.
        ValueError: A shape or device is not as above, a row is out of range (on a CPU; on a GPU it
            fails an assertion on the device, which ends the process's use of it), or the named
            `impl` cannot run.
    """
    check_quantized("t", t)
    check_tensor("rows_R", rows_R)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"`dtype` must be float32, bfloat16 or float16, got {dtype}.")
    if t.data.ndim != 2 or t.dim != 1:
        raise ValueError(
            f"`t` must be (T, K), quantised along K, got {tuple(t.shape)} along `dim`={t.dim}."
        )
    if rows_R.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"`rows_R` must be int32 or int64, got {rows_R.dtype}.")
    if rows_R.ndim != 1 or rows_R.device != t.device:
        raise ValueError(
            f"`rows_R` must be (R,) on the device of `t`, {t.device}, got {tuple(rows_R.shape)} on "
            f"{rows_R.device}."
        )
    T = t.shape[0]
    if rows_R.device.type == "cpu" and bool(((rows_R < -1) | (rows_R >= T)).any()):
        raise ValueError(f"`rows_R` must be in [-1, {T}), the rows of `t`; it is not everywhere.")
    if pick(impl, t.device):
        codes = t.data.view(torch.uint8)
        return _quantize_kernels.dequantize_rows(codes, t.scales, rows_R, t.element, dtype)
    if T == 0:
        return torch.zeros(rows_R.numel(), t.shape[1], dtype=dtype, device=t.device)
    chosen_R = rows_R.clamp_min(0)
    codes = t.data.view(torch.uint8).index_select(0, chosen_R).view(t.data.dtype)
    scales = t.scales.index_select(0, chosen_R)
    values = dequantize(MXTensor(codes, scales, 1, t.element), dtype, impl=impl)
    return values.masked_fill_((rows_R < 0)[:, None], 0)
