"""Weight gradients that somebody computes later than the rest of a backward ("delayed wgrad").

A pipeline's stages wait for each other's input gradients alone. So a call may ask, in its forward,
whether the gradients of its weights may wait. If so, its backward makes all other gradients and
hands over a function that makes these.

The weights that wait are no inputs of the graph: if they were, and backward returned None for them,
torch would still run their hooks, and who counts gradients by a hook would count one too many.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

Compute = Callable[[], tuple[Tensor | None, ...]]
Work = Callable[[], Tensor]


class Defer(Protocol):
    """Says whether the weight gradients of a call may be computed later than its backward.

    `defer(weights)` is called in the forward of a call that will have a backward, with its
    parameters that require a gradient. It returns None: the gradients are wanted in the backward,
    as ever. Or it returns a function, to which the backward of the call hands `compute`, once.
    `compute()` must then be called exactly once, after that backward, and returns a gradient for
    each of the weights. `PipelineExecutor.defer` of olmo-pipeline is one.
    """

    def __call__(self, weights: tuple[nn.Parameter, ...], /) -> Callable[[Compute], object] | None:
        """Return what takes `compute`, or None."""
        ...


class Later:
    """The weights of one call whose gradients wait.

    Args:
        weights: By name.
        take: What `defer` returned.
    """

    def __init__(
        self, weights: Mapping[str, nn.Parameter], take: Callable[[Compute], object]
    ) -> None:
        self.weights = weights
        # It stands for the weights: the result requires a gradient although they are no inputs.
        self.anchor = torch.empty((), requires_grad=True)
        self._take = take
        self._work: dict[str, Work] = {}

    def has(self, name: str) -> bool:
        """Whether the gradient of this weight waits."""
        return name in self.weights

    def leave(self, name: str, work: Work) -> None:
        """Leave the gradient of one weight to a function that makes it."""
        self._work[name] = work

    def hand_over(self) -> None:
        """Give away what was left, which must be all."""
        waiting = [self._work.pop(name) for name in self.weights][::-1]

        def compute() -> tuple[Tensor | None, ...]:
            if not waiting:
                raise RuntimeError("deferred weight gradients must be computed once, got twice.")
            made: list[Tensor | None] = []
            with torch.no_grad():
                while waiting:
                    made.append(waiting.pop()())  # which frees what it was made of
            return tuple(made)

        self._take(compute)


def ask(defer: Defer | None, weights: Mapping[str, Tensor | None]) -> Later | None:
    """Ask `defer`, if there is one, whether those of the weights that are parameters may wait.

    Gradients of others are wanted in the backward: what made them has a backward, too.
    """
    if defer is None or not torch.is_grad_enabled():
        return None
    own = {
        name: weight
        for name, weight in weights.items()
        if isinstance(weight, nn.Parameter) and weight.requires_grad
    }
    take = defer(tuple(own.values())) if own else None
    if take is None:
        return None
    if not callable(take):
        raise TypeError(
            f"`defer` must return None or a function that takes `compute`, got {take!r}."
        )
    return Later(own, take)


def check_defer(defer: object) -> None:
    """It is a function, or there is none."""
    if defer is not None and not callable(defer):
        raise TypeError(f"`defer` must be a function or None, got {defer!r}.")
