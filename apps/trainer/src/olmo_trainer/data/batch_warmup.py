"""How the global batch grows over the first steps of a run: a function of the step.

From `start` sequences to `sequences` there are n = (sequences - start) / increment increments, and

    size(s) = start + increment * floor(s n / steps)      for s < steps,      else sequences

so that each of the n smaller sizes lasts for `steps / n` steps. How many sequences were drawn
before a step is a sum over increments, not over steps; a resume knows its place at once.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchWarmup:
    """A growing batch.

    Attributes:
        start: Sequences of the first step, at least 1.
        increment: Sequences added at a time, at least 1.
        steps: Steps before the whole batch, at least 1.

    Raises:
        ValueError: A number is below 1.
    """

    start: int
    increment: int
    steps: int

    def __post_init__(self) -> None:
        for name in ("start", "increment", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")

    def size(self, step: int, sequences: int) -> int:
        """Return the sequences of `step` (0 = the first) on the way to `sequences`."""
        if step >= self.steps:
            return sequences
        num_increments = (sequences - self.start) // self.increment
        return self.start + self.increment * (step * num_increments // self.steps)

    def position(self, step: int, sequences: int) -> int:
        """Return the sequences of all steps before `step`."""
        num_increments = (sequences - self.start) // self.increment
        growing = min(step, self.steps)
        # Increment k is there from the step ceil(k steps / n) on.
        begun = (-(-k * self.steps // num_increments) for k in range(1, num_increments))
        grown = sum(max(0, growing - first) for first in begun)
        whole = (step - growing) * sequences
        return growing * self.start + self.increment * grown + whole
