"""torch's own grouped product of MXFP8 operands, for devices with scaled matrix units.

`torch.nn.functional.scaled_grouped_mm` takes, for rows of which each expert has some:

    rows      (R, K) E4M3, row-major, aligned to 16 bytes; K a multiple of 32
    weights   (E, K, N) E4M3, column-major, aligned to 16 bytes; N a multiple of 16
    scales    E8M0, one for each 32 of K, in tiles of 128 x 4 (`swizzle_scales`): those of the rows
              as a matrix, in which each expert begins a tile; those of the weights (E, bytes)
    offsets   int32, the ends of the experts' rows
    result    (R, N) bfloat16; rows past the last end are not written

Its kernel divides the rows by the experts to choose a tiling, and takes a quotient of 0 for a
product without rows: with fewer rows than experts nothing is written.

Shapes: R rows, N output features, K contraction, E experts. Source: torch 2.11,
`aten/src/ATen/native/cuda/GroupedBlas.cpp`, and MSLK's `mx8mx8bf16_grouped.cu`, which it calls.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ._formats import BLOCK
from ._product_kernels import _dense, why_not_generation
from ._swizzle import COLUMNS, ROWS, swizzle_scales
from ._tensor import MXTensor

_CUDA = (12, 8)
"""The first version that torch builds the product for."""


def why_not_torch(a: MXTensor, b: MXTensor, out_dtype: torch.dtype) -> str | None:
    """Say why torch's product cannot multiply `a` by `b`, or return None when it can.

    Args:
        a: `(R, K)`, quantised along K. Its device has scaled units: of CUDA's, only those of
            compute capability 10.x have torch's kernel.
        b: `(E, N, K)`, quantised along K.
        out_dtype: Of the result.
    """
    reason = why_not_build()
    R, (E, N, _) = a.shape[0], b.shape
    if reason is None and a.device.type == "cuda":
        reason = why_not_generation(a.device.index, 10)
    if reason is None and (a.element, b.element) != ("e4m3", "e4m3"):
        reason = f"both elements must be e4m3, got {a.element} and {b.element}"
    if reason is None and out_dtype != torch.bfloat16:
        reason = f"its result is bfloat16, not {out_dtype}"
    if reason is None and N % 16:
        reason = f"the output width must be a multiple of 16, got {N}"
    if reason is None and R < E:
        reason = f"it needs at least as many rows as experts, got {R} and {E}"
    return reason


def why_not_build() -> str | None:
    """Say why this build of torch has no such product, or return None when it has."""
    return _why_not_build()


# As with `why_no_kernel`: a constant of a compiled graph.
why_not_build._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess] # what torch.compiler.assume_constant_result sets, without importing the compiler


@cache
def _why_not_build() -> str | None:
    if not hasattr(F, "scaled_grouped_mm"):
        return f"torch {torch.__version__} has no scaled_grouped_mm"
    version = torch.version.cuda
    if version is None or tuple(map(int, version.split(".")[:2])) < _CUDA:
        return f"it needs a torch for CUDA 12.8 or newer, this one is for {version}"
    if not any(name in torch.__config__.show() for name in ("USE_MSLK", "USE_FBGEMM_GENAI")):
        return "this torch was built without its kernels (USE_MSLK)"
    return None


@torch.library.custom_op("olmo_mxfp8::torch_row_product", mutates_args=())
def torch_row_product(
    a_RK: Tensor, a_scales: Tensor, b_ENK: Tensor, b_scales: Tensor, offsets_E: Tensor
) -> Tensor:
    """Return `a @ b[e].T` in bfloat16 of E4M3 codes, uint8; rows past the last offset are 0.

    The scale bytes are those of an `MXTensor`, (R, K / 32) and (E, N, K / 32); they are laid out
    anew in each call.
    """
    (R, K), N = a_RK.shape, b_ENK.shape[1]
    if a_RK.numel() == 0 or b_ENK.numel() == 0:
        return a_RK.new_zeros(R, N, dtype=torch.bfloat16)
    offsets_E = offsets_E.contiguous()
    starts_E = F.pad(offsets_E[:-1], (1, 0))
    in_order = (starts_E >= 0) & (starts_E <= offsets_E) & (offsets_E <= R)
    torch._assert_async(
        in_order.all(), "`offsets_E` must ascend from at least 0 to at most the rows"
    )
    wide = -(-K // (BLOCK * COLUMNS)) * COLUMNS
    b_padded = F.pad(b_scales, (0, 0, 0, -N % ROWS))
    y_RN = F.scaled_grouped_mm(  # pyright: ignore[reportAttributeAccessIssue] # newer torch has it
        _dense(a_RK).view(torch.float8_e4m3fn),
        _dense(b_ENK).view(torch.float8_e4m3fn).mT,
        _e8m0(swizzle_scales(a_scales, offsets_E), wide),
        F.ScalingType.BlockWise1x32,
        _e8m0(swizzle_scales(b_padded.flatten(0, 1)), b_padded.shape[1] * wide),
        F.ScalingType.BlockWise1x32,
        swizzle_a=F.SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=F.SwizzleType.SWIZZLE_32_4_4,
        offs=offsets_E,
        output_dtype=torch.bfloat16,
    )
    rows_R = torch.arange(R, device=a_RK.device)
    # As elements of 16 bytes: a masked fill of 2-byte elements is far from the speed of a copy.
    y_RN.view(torch.complex128).masked_fill_((rows_R >= offsets_E[-1])[:, None], 0)
    return y_RN


def _e8m0(swizzled: Tensor, width: int) -> Tensor:
    """View bytes as E8M0 scales in rows of `width`."""
    return swizzled.view(-1, width).view(torch.float8_e8m0fnu)


@torch_row_product.register_fake
def _(a_RK: Tensor, a_scales: Tensor, b_ENK: Tensor, b_scales: Tensor, offsets_E: Tensor) -> Tensor:
    return a_RK.new_empty(a_RK.shape[0], b_ENK.shape[1], dtype=torch.bfloat16)
