"""`MXRecipe`: which products of a layer run in MXFP8, and how their operands are quantised."""

from dataclasses import dataclass
from typing import Literal, get_args

from ._formats import (
    Element,
    RowGranularity,
    ScaleRule,
    WeightGranularity,
    check_element,
    check_row_granularity,
    check_scale_rule,
)
from ._product_impl import ProductImpl, check_product_impl
from ._quantize_impl import Impl

Precision = Literal["mxfp8", "high"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MXRecipe:
    """How a layer quantises. The forward always multiplies in MXFP8.

    Args:
        element: The format of activations and weights.
        grad_element: The format of the output's gradient.
        scale_rule: `"rceil"` never saturates; `"floor"` is the rule of the OCP specification.
        granularity: 32, or 128: rows share each scale among 128 values and weights among tiles of
            128 x 128, which Hopper's FP8 units can multiply.
        input_grad: The product that gives the input's gradient: `"mxfp8"`, or `"high"`: the
            gradient as it arrives times the weight as it is.
        weight_grad: The product that gives the weight's gradient, over tokens: `"high"`, the
            gradient as it arrives times the dequantised input; or `"mxfp8"`: both are quantised
            along the tokens of each expert, padded to whole blocks, so that no scale is shared by
            two experts. The `"coarse"` products multiply these codes, too; others dequantise them.
        saved: What `MXExperts` keeps of its hidden layer for backward: `"high"`, as it is, or
            `"mxfp8"`, 33/32 bytes a value. It is of no consequence to `MXLinear`, `mx_linear` and
            `mx_grouped_mm`, whose inputs are kept in MXFP8, as they were multiplied, in any case;
            so is the input of `MXExperts`.
        impl: Which implementation multiplies, as for `scaled_grouped_mm`. Products in high
            precision run in float32 in the reference, else on bfloat16 operands. With a named
            kernel, kernels quantise too.

    Raises:
        ValueError: A field is not one of its choices.
    """

    element: Element = "e4m3"
    grad_element: Element = "e4m3"
    scale_rule: ScaleRule = "rceil"
    granularity: RowGranularity = 32
    input_grad: Precision = "mxfp8"
    weight_grad: Precision = "high"
    saved: Precision = "high"
    impl: ProductImpl = "auto"

    def __post_init__(self) -> None:
        check_element("element", self.element)
        check_element("grad_element", self.grad_element)
        check_scale_rule(self.scale_rule)
        check_row_granularity(self.granularity)
        precisions = (self.input_grad, self.weight_grad, self.saved)
        for name, precision in zip(("input_grad", "weight_grad", "saved"), precisions, strict=True):
            if precision not in get_args(Precision):
                raise ValueError(f"`{name}` must be 'mxfp8' or 'high', got {precision!r}.")
        check_product_impl("impl", self.impl)

    @property
    def quantise_impl(self) -> Impl:
        """What quantises: where a recipe names kernels for its products, kernels."""
        return "auto" if self.impl in ("auto", "reference") else "triton"

    @property
    def weight_granularity(self) -> WeightGranularity:
        """That of the weights."""
        return "128x128" if self.granularity == 128 else 32


def check_recipe(recipe: object) -> None:
    """Raise `TypeError` unless `recipe` is an `MXRecipe`."""
    if not isinstance(recipe, MXRecipe):
        raise TypeError(f"`recipe` must be an MXRecipe, got {recipe!r}; `MXRecipe()` is one.")


DEFAULT_RECIPE = MXRecipe()
