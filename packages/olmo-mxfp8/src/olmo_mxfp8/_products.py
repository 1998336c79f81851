"""Products of operands that are known to fit, by the implementation that was picked.

The reference form takes the ends of the experts as integers, the kernels as a tensor on the device.

Shapes: R rows, N output features, K contraction, E experts.
"""

import torch
from torch import Tensor

from . import reference
from ._groups import Groups
from ._product_impl import ProductImpl
from ._product_kernels import outer_product, row_product, scaled_row_product
from ._quantize import dequantize
from ._tensor import MXTensor
from ._torch_product import torch_row_product, why_not_torch


def multiply_rows(
    a: MXTensor, b: MXTensor | Tensor, groups: Groups, impl: ProductImpl, out_dtype: torch.dtype
) -> Tensor:
    """Return `a @ b[e].T` for the rows of each expert, `(R, N)`, and 0 in the rows past them.

    Args:
        a: `(R, K)`, quantised along K.
        b: `(E, N, K)`, quantised along K; for "dequantise" also its values in `operand_dtype`.
        groups: The form that `impl` takes.
        impl: Not "auto".
        out_dtype: Of the result.
    """
    if impl == "dequantise":
        dtype = operand_dtype(a.device)
        b_ENK = dequantize(b, dtype) if isinstance(b, MXTensor) else b
        return row_product(dequantize(a, dtype), b_ENK, groups.offsets_E, out_dtype)
    assert isinstance(b, MXTensor), "only 'dequantise' multiplies values"
    if impl == "reference":
        assert groups.ends is not None, "the reference takes the ends as integers"
        used = slice(0, groups.ends[-1])
        rows = MXTensor(a.data[used], a.scales[used], a.dim, a.element)
        product = reference.grouped_product(
            dequantize(rows), dequantize(b), groups.ends, a.shape[0]
        )
        # Fresh, also in float32: `torch.compile` gives a gradient of 0 to what `out=` has written.
        return product.to(out_dtype, copy=True)
    if impl == "native" and why_not_torch(a, b, out_dtype) is None:
        codes = a.data.view(torch.uint8), b.data.view(torch.uint8)
        return torch_row_product(codes[0], a.scales, codes[1], b.scales, groups.offsets_E)
    return scaled_row_product(
        a.data.view(torch.uint8),
        a.scales,
        a.element,
        b.data.view(torch.uint8),
        b.scales,
        b.element,
        groups.offsets_E,
        out_dtype,
        impl == "coarse",
    )


def multiply_across_rows(
    a_RN: Tensor, b_RK: Tensor, groups: Groups, impl: ProductImpl, out_dtype: torch.dtype
) -> Tensor:
    """Return `a.T @ b` over the rows of each expert, `(E, N, K)`, from ordinary operands.

    The reference multiplies in float32, every other implementation in bfloat16; both add in
    float32.
    """
    if impl == "reference":
        assert groups.ends is not None, "the reference takes the ends as integers"
        product = reference.grouped_outer_product(a_RN.float(), b_RK.float(), groups.ends)
        return product.to(out_dtype)
    dtype = operand_dtype(a_RN.device)
    return outer_product(a_RN.to(dtype), b_RK.to(dtype), groups.offsets_E, out_dtype)


def operand_dtype(device: torch.device) -> torch.dtype:
    """What kernels multiply: bfloat16 holds every MXFP8 value from 2^-133 on exactly.

    Triton's interpreter, the one place where they run on a CPU, gets bfloat16 wrong.
    """
    return torch.bfloat16 if device.type == "cuda" else torch.float32
