"""Steps that are run again because too many of their routes found no room.

    forward, backward, sums over all ranks -> dropped / requested > most_dropped ?
    -> larger buffers, everything of the step again from its batch -> ... -> optimizer

Nothing of a step is kept but what its last run left: gradients and statistics begin at zero each
time, no random numbers are drawn in a step, and weights, moments, selection biases and the guard
move only after the last run. So a step is bitwise what it is where its last capacity was there from
the start. The decision is one of exact counts summed over the world: every rank runs again or none.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from olmo_trainer.config import DropsRerun
from olmo_trainer.growing_dispatcher import GrowingDispatcher
from olmo_trainer.statistics import StepStatistics

PREFIX = "rerun."  # of the names that its tensors have in a checkpoint


class DroppedError(RuntimeError):
    """Too many routes of a step are dropped with the largest buffers too."""


@dataclass(frozen=True)
class Reruns:
    """How a step came to its numbers; plain values, the same on every rank."""

    times: int = 0  # run again
    capacity_factor: float | None = None  # of the last run; `None` where nothing may run again
    dropped_part: float = 0.0  # of the routes of the last run
    over_limit: bool = False  # more are dropped than may be, all the same

    def describe(self, before: "Reruns") -> str:
        """Return what a person should know of it, as words after the step's number; or nothing.

        Of steps in a row that are taken over the limit, and not run again, the first is told:
        `before` is how the last step went.
        """
        words = []
        if self.times:
            words.append(
                f"was run {self.times + 1} times, up to a capacity factor of "
                f"{self.capacity_factor:.4g}, which stays"
            )
        if self.over_limit and (self.times or not before.over_limit):
            words.append(f"is taken, but {self.dropped_part:.2%} of its routes found no room")
        return "; it ".join(words)


class StepRerun:
    """Runs a step until few enough of its routes are dropped.

    Args:
        config: How many may be, and how often.
        dispatcher: What drops them.
    """

    def __init__(self, config: DropsRerun, dispatcher: GrowingDispatcher) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._last = Reruns()
        self._factor = torch.tensor(dispatcher.factor, dtype=torch.float64)

    def repeat(self, run: Callable[[], None], statistics: StepStatistics) -> None:
        """Call `run` once, and again with larger buffers while it drops too much.

        Collective over the world. Reads the device after each.

        Args:
            run: Does all of a step before its update, from nothing, and leaves its sums over all
                ranks in `statistics`.
            statistics: Of the step.

        Raises:
            DroppedError: Larger buffers cannot be made. The step is not taken.
        """
        config, times = self._config, 0
        run()
        # A step that diverged is left to the guard: more room would not help it.
        while (part := statistics.dropped_part() or 0.0) > config.most_dropped:
            if times == config.most_times or not self._grow():
                break
            times += 1
            run()
        over = part > config.most_dropped
        self._last = Reruns(times, self._dispatcher.factor, part, over)

    def report(self) -> Reruns:
        """Return how the last step went."""
        return self._last

    def require_room(self, step: int) -> None:
        """Raise when the last step dropped too much and is not to be taken; `step` is its number.

        Raises:
            DroppedError: On every rank alike.
        """
        last, config = self._last, self._config
        if last.over_limit and config.at_limit == "stop":
            raise DroppedError(
                f"step {step}: {last.dropped_part:.2%} of its routes found no room, "
                f"{config.most_dropped:.2%} may, after {last.times} reruns up to a capacity factor "
                f"of {last.capacity_factor:.4g}; nothing was updated. Raise "
                "rerun.most_capacity_factor, rerun.most_times or rerun.most_dropped, or take such "
                "steps with rerun.at_limit=take."
            )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the live tensor that a checkpoint holds: the capacity factor, 0-d float64.

        To load into it is half of loading; `finish_loading` is the other.
        """
        return {f"{PREFIX}capacity_factor": self._factor}

    def finish_loading(self) -> None:
        """Make the buffers of a factor just loaded, as far as this run's may grow; collective.

        They do not shrink: a larger capacity that the configuration asks for stands.
        """
        loaded = min(self._factor.item(), self._dispatcher.most)
        if loaded > self._dispatcher.factor:
            self._dispatcher.resize(loaded)
        self._factor.fill_(self._dispatcher.factor)

    def _grow(self) -> bool:
        try:
            grown = self._dispatcher.grow(self._config.growth)
        except ValueError as error:
            raise DroppedError(
                f"larger buffers for dropped routes cannot be made: {error}; lower "
                "rerun.most_capacity_factor"
            ) from error
        self._factor.fill_(self._dispatcher.factor)
        return grown
