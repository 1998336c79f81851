"""Exact MXFP8: quantise, dequantise, scaled products and layers, on any device."""

from ._functional import MXRecipe as MXRecipe
from ._functional import mx_grouped_mm as mx_grouped_mm
from ._functional import mx_linear as mx_linear
from ._matmul import scaled_grouped_mm as scaled_grouped_mm
from ._matmul import scaled_mm as scaled_mm
from ._module import MXLinear as MXLinear
from ._quantize import dequantize as dequantize
from ._quantize import quantize as quantize
from ._quantize import quantize_both as quantize_both
from ._swizzle import swizzle_scales as swizzle_scales
from ._swizzle import unswizzle_scales as unswizzle_scales
from ._tensor import MXTensor as MXTensor

__all__ = [
    "MXLinear",
    "MXRecipe",
    "MXTensor",
    "dequantize",
    "mx_grouped_mm",
    "mx_linear",
    "quantize",
    "quantize_both",
    "scaled_grouped_mm",
    "scaled_mm",
    "swizzle_scales",
    "unswizzle_scales",
]
