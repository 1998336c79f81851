"""Products of two MXFP8 operands.

    scaled_mm:          y_mn = sum_k a_mk b_nk
    scaled_grouped_mm:  the same for the rows of each expert, with that expert's `b`

An element times its scale has at most four significant bits, so a product of two is exact in
float32 and the sum, also in float32, is the only rounding before the last one to `out_dtype`. The
implementations differ in where they multiply:

    reference    the dequantised operands, in float32, in plain torch
    dequantise   the same values in bfloat16, which holds them exactly, on any GPU's tensor cores
    coarse       the codes, on Hopper's FP8 units, where 128 values share a scale
    native       the codes, on Blackwell's scaled units, by torch's product or a kernel of ours

Shapes: M, R rows, N output features, K contraction, E experts.
Source: OCP Microscaling Formats (MX) Specification 1.0, section 6.2 (the dot product).
"""

import torch

from ._groups import read_groups, whole
from ._product_impl import ProductImpl, pick_product
from ._products import multiply_rows
from ._tensor import MXTensor, check_quantized
from ._uncompiled import uncompiled


def scaled_mm(
    a: MXTensor,
    b: MXTensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    impl: ProductImpl = "auto",
) -> torch.Tensor:
    """Return `a @ b.T`, accumulated in float32.

    Args:
        a: `(M, K)`, quantised along K.
        b: `(N, K)`, quantised along K, laid out as in `nn.Linear`; its element format may differ.
        out_dtype: bfloat16, float16 or float32.
        impl: As for `scaled_grouped_mm`.

    Returns:
        `out_dtype`, `(M, N)`.

    Raises:
        TypeError: `out_dtype` is another one, or an operand no `MXTensor`.
        ValueError: The shapes, dimensions or devices do not fit, or the named `impl` cannot run.
    """
    _check_operands(a, b, b_ndim=2)
    _check_out_dtype(out_dtype)
    impl = pick_product(impl, a.device, (a.granularity, b.granularity), a.shape[0], 1, b.shape[0])
    return multiply_rows(a, as_stack(b), whole(a.shape[0], a.device, impl), impl, out_dtype)


@uncompiled(reason="the reference form reads `offsets_E` on the host")
def scaled_grouped_mm(
    a: MXTensor,
    b: MXTensor,
    offsets_E: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    impl: ProductImpl = "auto",
) -> torch.Tensor:
    """Return `a @ b[e].T` for the rows of each expert `e`, accumulated in float32.

    Expert `e` has the rows from `offsets_E[e - 1]` (0 for the first) to `offsets_E[e]`, possibly
    none. Rows past `offsets_E[-1]` are not read, whatever they hold, and are 0 in the output.

    Args:
        a: `(R, K)`, quantised along K.
        b: `(E, N, K)`, quantised along K; its element format may differ.
        offsets_E: int32, `(E,)`, the inclusive ends of each expert's rows, ascending, at most R.
        out_dtype: bfloat16, float16 or float32.
        impl: `"reference"` is plain torch in float32; on a GPU it reads the offsets, so the host
            waits. The others are Triton kernels without a host sync, for N a multiple of 8, up to
            512 experts and fewer than 2^30 rows. `"dequantise"` makes bfloat16 copies of both
            operands, exact for values from 2^-133 on, and multiplies those: CUDA of compute
            capability 8.0 or newer. `"coarse"` multiplies the codes on FP8 tensor cores and adds in
            float32 after each 128 of K: compute capability 9.x and triton 3.6 or newer, `a` of
            granularity 128, `b` of granularity `"128x128"`. Those cores keep 13 bits behind the
            largest of 128 products: on ordinary data the result is within `2^-10 sum |a| |b|` of
            the exact sum, and within `2^-5.9 sum |a| |b|` where few products outweigh all others.
            That is so where the two scales of each 128 multiply to 2^-149 up to 2^127 (bytes that
            add up to 105 up to 381). Where they multiply to less, those 128 add 0; to more, they
            are scaled by 2^127, so that what they add is too small unless it overflows. `quantize`
            with `"rceil"` and e4m3 goes there only where the largest values that share the two
            scales multiply to less than 2^-132 or more than 2^143.
            `"native"` gives codes and scales to the scaled units of compute capability 10.x and
            12.x, which nobody has run yet: by torch's `scaled_grouped_mm` where this torch has it
            and it can (10.x, two e4m3 operands, bfloat16 out, N a multiple of 16, at least as many
            rows as experts), else by a Triton kernel. On a CPU only `"dequantise"` runs, in
            Triton's interpreter.
            `"auto"` is the first of `"coarse"` and `"dequantise"` that can run, on CUDA, because
            each reads the operands once and waits for nothing on the host; and `"reference"`
            everywhere else.

    Returns:
        `out_dtype`, `(R, N)`.

    Raises:
        TypeError: `offsets_E` or `out_dtype` has another dtype, or an operand is no `MXTensor`.
        ValueError: The shapes, dimensions or devices do not fit, the offsets do not (checked where
            they can be read without waiting, on a CPU and by the reference), or the named `impl`
            cannot run.

    Note:
        Offsets on a GPU that decrease or pass R fail an assertion on the device, which ends the
        process's use of it. `torch.compile` breaks its graph here.
    """
    _check_operands(a, b, b_ndim=3)
    _check_out_dtype(out_dtype)
    granularities = (a.granularity, b.granularity)
    impl = pick_product(impl, a.device, granularities, a.shape[0], b.shape[0], b.shape[1])
    groups = read_groups(offsets_E, b.shape[0], a.shape[0], a.device, impl)
    return multiply_rows(a, b, groups, impl, out_dtype)


def as_stack(b: MXTensor) -> MXTensor:
    """Return one matrix as the weights of one expert."""
    return MXTensor(b.data[None], b.scales[None], b.dim + 1, b.element, b.granularity)


def _check_operands(a: MXTensor, b: MXTensor, b_ndim: int) -> None:
    check_quantized("a", a)
    check_quantized("b", b)
    if a.data.ndim != 2 or b.data.ndim != b_ndim:
        expected = "(N, K)" if b_ndim == 2 else "(E, N, K)"
        raise ValueError(
            f"`a` must be (M, K) and `b` {expected}, got {tuple(a.shape)} and {tuple(b.shape)}."
        )
    for name, operand in (("a", a), ("b", b)):
        if operand.dim != operand.data.ndim - 1:
            raise ValueError(
                f"`{name}` must be quantised along its last dimension, the contraction, got `dim`="
                f"{operand.dim} of {tuple(operand.shape)}; quantise the transposed tensor instead."
            )
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"`a` and `b` must have the same last dimension, got {tuple(a.shape)} and "
            f"{tuple(b.shape)}; `b` is stored as (.., out, in)."
        )
    if a.device != b.device:
        raise ValueError(f"`a` and `b` must be on one device, got {a.device} and {b.device}.")


def _check_out_dtype(out_dtype: torch.dtype) -> None:
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"`out_dtype` must be bfloat16, float16 or float32, got {out_dtype}.")
