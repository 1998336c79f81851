"""`MXLinear`: `nn.Linear` whose products run on MXFP8 operands."""

from typing import Self

import torch
from torch import nn

from ._cached_module import CachedModule
from ._formats import check_blocks, check_source_dtype
from ._functional import mx_linear
from ._recipe import DEFAULT_RECIPE, MXRecipe, check_recipe


class MXLinear(CachedModule, nn.Linear):
    """A drop-in for `nn.Linear` that multiplies in MXFP8.

    The parameters are ordinary high-precision ones, with the names, shapes and initial values of
    `nn.Linear`, and nothing else is in the state dict: checkpoints go both ways. Unless `cached`,
    each forward quantises the weight as it is now, so no optimizer step, load or edit can leave a
    stale copy. For backward it keeps the input as it was multiplied, in MXFP8, 33/32 bytes a value,
    whatever the recipe's `saved`.

    Args:
        in_features: Input width D, a multiple of the recipe's granularity.
        out_features: Output width F, a multiple of it too, the contraction of the input gradient.
        bias: Add a learned `(F,)`, in high precision, after the product is rounded. Unlike
            `nn.Linear`, a layer has none unless asked.
        recipe: How the operands are quantised.
        cached: Keep the weight quantised between steps, in a `WeightCache`. `refresh` must then
            follow each step of the optimizer and each edit; a forward with a stale copy raises.
        device: Of the parameters.
        dtype: Of the parameters: float32, bfloat16 or float16.

    Attributes:
        defer: As for `mx_linear`, None at first; set it when there is something to ask, such as
            `executor.defer` of a pipeline. Copies and pickles of the layer have none.

    Raises:
        TypeError: `dtype` is another one, or `recipe` no `MXRecipe`.
        ValueError: A width is not a multiple of the granularity.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        recipe: MXRecipe = DEFAULT_RECIPE,
        cached: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_recipe(recipe)
        check_source_dtype("dtype", torch.get_default_dtype() if dtype is None else dtype)
        check_blocks("`in_features`", in_features, recipe.granularity)
        check_blocks("`out_features`", out_features, recipe.granularity)
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.recipe = recipe
        self._cache_weights(cached, "weight")

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, recipe: MXRecipe = DEFAULT_RECIPE, *, cached: bool = False
    ) -> Self:
        """Return a layer that shares the parameters of `linear` (the same objects, not copies).

        Raises:
            TypeError: `linear` has parameters of another dtype than the three that a layer takes.
            ValueError: A width of `linear` is not a multiple of the granularity.
        """
        sizes = (linear.in_features, linear.out_features)
        layer = cls(*sizes, recipe=recipe, device="meta", dtype=linear.weight.dtype)
        layer.weight, layer.bias = linear.weight, linear.bias
        layer._cache_weights(cached, "weight")
        return layer.train(linear.training)

    def reset_parameters(self) -> None:
        """Draw the parameters as `nn.Linear` does."""
        super().reset_parameters()
        self.refresh()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return `input @ weight.T + bias`, `(.., F)`, in the dtype of `input`, `(.., D)`."""
        cache = self.cache_of("weight")
        y = mx_linear(input, self.weight, recipe=self.recipe, cache=cache, defer=self.defer)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """Return what `nn.Linear` prints, and the recipe."""
        cached = ", cached=True" if self.caches is not None else ""
        return f"{super().extra_repr()}, recipe={self.recipe}{cached}"
