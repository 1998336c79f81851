"""Weights quantised once a step: made when the model is in place, renewed when it moves.

Every microbatch and both directions multiply the same MXFP8 weights, so they are quantised once,
after the start, after each step and after a load, whenever the optimizer has rebuilt them. A copy
that is older than its weight raises in the forward; it never trains.

The copies are made from the model's own parameters, which on a GPU are in BF16, and not from the
optimizer's FP32 main weights: so a forward in BF16 and one in MXFP8 see the same weights, of which
the second rounds once more, and what a precision costs is the products' doing alone.
"""

from collections.abc import Sequence

from olmo_mxfp8 import MXExperts, MXLinear, WeightCache
from torch import nn


class WeightCaches:
    """The quantised weights of one rank, by the global names of their parameters."""

    def __init__(self) -> None:
        self._by_name: dict[str, WeightCache] = {}

    def make(self, part: nn.Module) -> None:
        """Quantise the weights of every MXFP8 layer of `part`, which moves no more after this."""
        for prefix, layer in part.named_modules():
            if isinstance(layer, MXLinear | MXExperts):
                layer.caches = {
                    name: WeightCache(parameter, recipe=layer.recipe)
                    for name, parameter in layer.named_parameters(recurse=False)
                }
                self._by_name |= {f"{prefix}.{name}": each for name, each in layer.caches.items()}

    def refresh(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Quantise those of `parameters`, by global name, that are multiplied in MXFP8."""
        for name, _ in parameters:
            if name in self._by_name:
                self._by_name[name].refresh()
