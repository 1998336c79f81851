"""Exact MXFP8: quantise, dequantise, scaled products and layers, on any device.

Where to change what:

    an element format         `_formats.py`: `FORMATS`
    a scale rule              `_formats.py` for its name, `reference.py`: `scale_bytes` for what it
                              means, `_triton/codes.py` for the kernels
    a layout of the scales    `_swizzle.py`
    a product on another GPU  `_product_impl.py` for its name and where it can run, `_products.py`
                              for its call, `_product_kernels.py` for the operator of its kernel
    what a cache holds        `_weight_cache.py`: `refresh`
    what a layer multiplies   `_recipe.py` for the choice, `_functional.py` and `_expert_mlp.py`

Public functions check what they are given. Behind them `_quantize_impl.py` and `_product_impl.py`
say which implementation runs, and `_quantize_kernels.py`, `_product_kernels.py` and
`_token_kernels.py` make operators of torch of the kernels in `_triton/`.
"""

from ._deferral import Defer as Defer
from ._dequantize_rows import dequantize_rows as dequantize_rows
from ._expert_mlp import mx_swiglu_experts as mx_swiglu_experts
from ._experts import MXExperts as MXExperts
from ._functional import mx_grouped_mm as mx_grouped_mm
from ._functional import mx_linear as mx_linear
from ._linear import MXLinear as MXLinear
from ._packer import MXPacker as MXPacker
from ._quantize import dequantize as dequantize
from ._quantize import quantize as quantize
from ._quantize import quantize_both as quantize_both
from ._quantize import quantize_with_transpose as quantize_with_transpose
from ._recipe import MXRecipe as MXRecipe
from ._scaled_mm import scaled_grouped_mm as scaled_grouped_mm
from ._scaled_mm import scaled_mm as scaled_mm
from ._swiglu import swiglu_quantize as swiglu_quantize
from ._swiglu import swiglu_quantize_backward as swiglu_quantize_backward
from ._swizzle import swizzle_scales as swizzle_scales
from ._swizzle import unswizzle_scales as unswizzle_scales
from ._tensor import MXTensor as MXTensor
from ._weight_cache import WeightCache as WeightCache
from ._weighted_quantize import weighted_quantize as weighted_quantize

__all__ = [
    "Defer",
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
    "quantize_with_transpose",
    "scaled_grouped_mm",
    "scaled_mm",
    "swiglu_quantize",
    "swiglu_quantize_backward",
    "swizzle_scales",
    "unswizzle_scales",
    "weighted_quantize",
]
