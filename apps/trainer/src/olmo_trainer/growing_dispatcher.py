"""A dispatcher with a capacity that may grow between steps.

Its receive buffers are made for a number of rows. More rows need other buffers: the old ones go
before the new ones come, so that a rank never holds both.
"""

import gc
from collections.abc import Callable

import torch
from olmo_ep_comm import Dispatched, Dispatcher


class GrowingDispatcher:
    """Dispatches and combines as the dispatcher of its capacity factor: see `Dispatcher`.

    Args:
        make: Returns the dispatcher of a capacity factor; collective over the expert group.
        factor: The first.
        most: The largest.
    """

    def __init__(self, make: Callable[[float], Dispatcher], factor: float, *, most: float) -> None:
        self._make = make
        self.most = most
        self._dispatcher: Dispatcher = make(factor)
        self.factor = factor
        self.num_experts = self._dispatcher.num_experts
        self.local_experts = self._dispatcher.local_experts

    def dispatch(
        self, x_TD: torch.Tensor, expert_ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> Dispatched:
        """Bring each token to the ranks of its experts: see `Dispatcher.dispatch`."""
        return self._dispatcher.dispatch(x_TD, expert_ids_TK, weights_TK)

    def combine(self, y_RD: torch.Tensor, handle: object) -> torch.Tensor:
        """Bring the rows home and add up each token's: see `Dispatcher.combine`."""
        return self._dispatcher.combine(y_RD, handle)

    def grow(self, growth: float) -> bool:
        """Multiply the capacity factor, as far as it may grow; return whether it has grown.

        Collective over the expert group, as `resize`.
        """
        factor = min(self.factor * growth, self.most)
        if factor <= self.factor:
            return False
        self.resize(factor)
        return True

    def resize(self, factor: float) -> None:
        """Make the buffers of `factor`, which may be above `most`.

        Collective over the expert group, between steps: every rank must be done with what was
        dispatched before, as it is when all have read a sum over all, and no graph of it may live.

        Raises:
            ValueError: The buffers cannot be made, as where there is no room for them. There is
                no dispatcher any more.
        """
        del self._dispatcher
        gc.collect()  # a graph in a cycle holds its buffers until it is collected
        self._dispatcher = self._make(factor)
        self.factor = factor
