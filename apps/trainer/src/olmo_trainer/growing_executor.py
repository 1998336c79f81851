"""A pipeline executor for any number of microbatches, one number at a time.

A schedule is made for a number of microbatches, which grows while the batch does. The executor of
the last number is kept; another number ends it and makes the next, on all ranks in the same step.
"""

from collections.abc import Callable, Sequence
from typing import Any

from olmo_pipeline import PipelineExecutor, PipelineResult
from torch import nn


class GrowingExecutor:
    """Runs and evaluates as a `PipelineExecutor`, whose number of microbatches may change.

    Args:
        make: Returns the executor of a number of microbatches; collective over the pipeline.
        num_microbatches: Of the first.
    """

    def __init__(self, make: Callable[[int], PipelineExecutor], num_microbatches: int) -> None:
        self._make = make
        self._executor = make(num_microbatches)
        self._num_microbatches = num_microbatches

    def run(self, microbatches: Sequence[Any], *, activation_shape: Any) -> PipelineResult:
        """Run these microbatches, any number of them but 0: see `PipelineExecutor.run`."""
        if len(microbatches) != self._num_microbatches:
            self._executor.close()
            self._executor = self._make(len(microbatches))
            self._num_microbatches = len(microbatches)
        return self._executor.run(microbatches, activation_shape=activation_shape)

    def evaluate(self, microbatches: Sequence[Any], *, activation_shape: Any) -> PipelineResult:
        """Run forward alone: see `PipelineExecutor.evaluate`."""
        return self._executor.evaluate(microbatches, activation_shape=activation_shape)

    def defer(self, weights: tuple[nn.Parameter, ...]) -> Callable[..., None] | None:
        """Say whether weight gradients may wait: see `PipelineExecutor.defer`."""
        return self._executor.defer(weights)
