"""`WeightCache`: a weight quantised once a step, along both of its contractions.

The forward contracts the input width and the input gradient the output width, and scales must lie
along the contraction, so a weight is quantised twice, from one read. Over the microbatches of a
step it does not change, and quantising it once is enough. A copy that is older than its weight
would train on the weight of another step without a sign of it: here it is an error.
"""

from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor

from ._formats import Element, ScaleRule, WeightGranularity, check_blocks, check_source
from ._products import operand_dtype
from ._quantize import dequantize, quantize, quantize_with_transpose
from ._quantize_impl import Impl
from ._recipe import DEFAULT_RECIPE, MXRecipe, check_recipe
from ._tensor import MXTensor
from ._uncompiled import uncompiled


class WeightCache:
    """Both quantised orientations of one weight, valid until it changes.

    Args:
        weight: float32, bfloat16 or float16, `(.., F, D)`: a linear layer or a stack of experts. D
            and F must be multiples of the granularity. It is held, not copied.
        recipe: How it is quantised.

    Raises:
        TypeError: `weight` has another dtype, or an argument another type.
        ValueError: `weight` has fewer than two dimensions or was made in inference mode, or a width
            is not a multiple of the granularity.

    Note:
        It takes 66/32 bytes a value. With the recipe's `impl="dequantise"` it takes 4 more, for the
        bfloat16 values that the products multiply, which saves a pass over the weights in each.

        Changes are seen by torch's version counter, which its own operations on the weight raise:
        an optimizer step, a load, an edit under `no_grad`. No other write is seen, and none could
        be short of reading the weight. Those are writes

        - through `weight.data`;
        - through a buffer that the weight was made a view of by `weight.data = flat.view(..)`,
          such as `flat.mul_(2)`, for the two count their changes apart;
        - by a collective of `torch.distributed`, such as `broadcast` and `all_reduce`, into the
          weight itself or a view of it; some raise the version with some backends, as gloo's
          `all_gather` does, and none is to be relied on;
        - through memory that is shared with numpy, DLPack or another process;
        - by a kernel or any code that was given a pointer.

        Call `refresh` after each of them: the products would be those of the old weight on this
        rank, without a sign of it. A copy, a deep copy and a pickle quantise anew where they
        arrive.
    """

    def __init__(self, weight: torch.Tensor, *, recipe: MXRecipe = DEFAULT_RECIPE) -> None:
        check_recipe(recipe)
        check_weight("weight", weight, recipe)
        if weight.is_inference():
            raise ValueError(
                "`weight` must count its changes, which a tensor made under "
                "`torch.inference_mode()` does not; make it outside or under `torch.no_grad()`, or "
                "do without a cache (`cached=False`)."
            )
        self.weight = weight
        self.recipe = recipe
        self.refresh()

    def __reduce__(self) -> tuple[Any, ...]:
        """Make copies and pickles of the weight alone, and quantise where they arrive."""
        return partial(WeightCache, recipe=self.recipe), (self.weight,)

    def refresh(self) -> None:
        """Quantise the weight as it is now.

        Call it after each step of the optimizer and load, and after what the class does not see.
        """
        self._forward, self._input_grad = quantize_with_transpose(
            self.weight, **_weight_options(self.recipe)
        )
        self._values: tuple[Tensor, Tensor] | None = None
        if self.recipe.impl == "dequantise":
            dtype = operand_dtype(self.weight.device)
            self._values = dequantize(self._forward, dtype), dequantize(self._input_grad, dtype)
        self._version, self._memory = self._state()

    @property
    def forward(self) -> MXTensor:
        """`(.., F, D)` with scales along D.

        Raises:
            RuntimeError: The weight has changed since it was quantised.
        """
        self._check()
        return self._forward

    @property
    def input_grad(self) -> MXTensor:
        """The transposed weight, `(.., D, F)`, with scales along F.

        Raises:
            RuntimeError: The weight has changed since it was quantised.
        """
        self._check()
        return self._input_grad

    @property
    def forward_operand(self) -> MXTensor | Tensor:
        """What the forward multiplies: `forward`, or its values where the recipe wants those."""
        forward = self.forward
        return forward if self._values is None else self._values[0]

    @property
    def input_grad_operand(self) -> MXTensor | Tensor:
        """What the input gradient multiplies: `input_grad`, or its values, as for the forward."""
        input_grad = self.input_grad
        return input_grad if self._values is None else self._values[1]

    def _state(self) -> tuple[int, tuple[int, torch.device]]:
        return self.weight._version, (self.weight.data_ptr(), self.weight.device)

    @uncompiled(reason="a `WeightCache` reads the version of its weight on the host")
    def _check(self) -> None:
        version, memory = self._state()
        if memory != self._memory:
            raise RuntimeError(
                "the weight of this `WeightCache` has moved in memory since it was quantised; call "
                "`refresh()` after moving it to another device or dtype."
            )
        if version != self._version:
            raise RuntimeError(
                f"this `WeightCache` is stale: its weight is at version {version} and was "
                f"quantised at version {self._version}; call `refresh()` after each step of the "
                "optimizer, load and edit."
            )


def quantize_weight(w: torch.Tensor, recipe: MXRecipe) -> MXTensor:
    """Return `w` quantised along its last dimension as `recipe` says."""
    return quantize(w, **_weight_options(recipe))


class _WeightOptions(TypedDict):
    element: Element
    scale_rule: ScaleRule
    granularity: WeightGranularity
    impl: Impl


def _weight_options(recipe: MXRecipe) -> _WeightOptions:
    return {
        "element": recipe.element,
        "scale_rule": recipe.scale_rule,
        "granularity": recipe.weight_granularity,
        "impl": recipe.quantise_impl,
    }


def check_weight(name: str, w: torch.Tensor, recipe: MXRecipe) -> None:
    """Raise what `WeightCache` documents."""
    check_source(name, w)
    if w.ndim < 2:
        raise ValueError(f"`{name}` must be (.., F, D), got {tuple(w.shape)}.")
    check_blocks(f"D, `{name}.shape[-1]`,", w.shape[-1], recipe.granularity)
    check_blocks(f"F, `{name}.shape[-2]`,", w.shape[-2], recipe.granularity)


def check_is_cache(name: str, cache: object) -> None:
    """Raise `TypeError` unless `cache` is a `WeightCache`."""
    if not isinstance(cache, WeightCache):
        raise TypeError(
            f"`{name}` must be a WeightCache, got {type(cache).__name__}; `WeightCache(w)` makes "
            f"one."
        )
