"""What modules with cached weights share: making the caches and renewing them."""

from typing import Any, Self

from torch import nn

from ._deferral import Defer
from ._recipe import MXRecipe
from ._weight_cache import WeightCache


class CachedModule(nn.Module):
    """A module that can keep its weights quantised between steps.

    A subclass calls `_cache_weights` once its parameters are there. A load and a move of the module
    renew the caches; after a step of the optimizer and an edit the user calls `refresh`
    (`WeightCache` lists the edits that it cannot see). State dicts hold the parameters alone.
    """

    recipe: MXRecipe
    caches: dict[str, WeightCache] | None = None
    """By the names of the parameters; None when each call quantises."""
    defer: Defer | None = None
    """Asked in each forward whether the gradients of the weights may be computed later."""
    _cached_names: tuple[str, ...] = ()

    def _cache_weights(self, cached: bool, *names: str) -> None:
        if cached:
            self._cached_names = names
            self.refresh()
            self.register_load_state_dict_post_hook(_refresh_after_load)

    def refresh(self) -> None:
        """Quantise the cached weights as they are now; nothing without caches."""
        if self._cached_names:
            self.caches = {
                name: WeightCache(self.get_parameter(name), recipe=self.recipe)
                for name in self._cached_names
            }

    def cache_of(self, name: str) -> WeightCache | None:
        """Return the cache of a parameter, or None when each call quantises it."""
        return None if self.caches is None else self.caches[name]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `defer`, which may hold on to processes."""
        return {name: value for name, value in vars(self).items() if name != "defer"}

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        super()._apply(*args, **kwargs)
        self.refresh()
        return self


def _refresh_after_load(module: nn.Module, incompatible_keys: Any) -> None:
    assert isinstance(module, CachedModule), "the hook is on modules with caches"
    module.refresh()
