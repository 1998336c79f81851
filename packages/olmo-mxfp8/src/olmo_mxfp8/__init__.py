"""Exact MXFP8: quantise, dequantise, scaled products and layers, on any device."""

from ._dequantize_rows import dequantize_rows as dequantize_rows
from ._expert_mlp import mx_swiglu_experts as mx_swiglu_experts
from ._experts import MXExperts as MXExperts
from ._functional import mx_grouped_mm as mx_grouped_mm
from ._functional import mx_linear as mx_linear
from ._matmul import scaled_grouped_mm as scaled_grouped_mm
from ._matmul import scaled_mm as scaled_mm
from ._module import MXLinear as MXLinear
from ._packer import MXPacker as MXPacker
from ._quantize import dequantize as dequantize
from ._quantize import quantize as quantize
from ._quantize import quantize_both as quantize_both
from ._recipe import MXRecipe as MXRecipe
from ._swiglu import swiglu_quantize as swiglu_quantize
from ._swiglu import swiglu_quantize_backward as swiglu_quantize_backward
from ._swizzle import swizzle_scales as swizzle_scales
from ._swizzle import unswizzle_scales as unswizzle_scales
from ._tensor import MXTensor as MXTensor
from ._weight_cache import WeightCache as WeightCache

__all__ = [
    "MXExperts",
    "MXLinear",
    "MXPacker",
    "MXRecipe",
    "MXTensor",
    "WeightCache",
    "dequantize",
    "dequantize_rows",
    "mx_grouped_mm",
    "mx_linear",
    "mx_swiglu_experts",
    "quantize",
    "quantize_both",
    "scaled_grouped_mm",
    "scaled_mm",
    "swiglu_quantize",
    "swiglu_quantize_backward",
    "swizzle_scales",
    "unswizzle_scales",
]
