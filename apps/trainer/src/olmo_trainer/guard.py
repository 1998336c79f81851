"""Steps that are left out because they would do harm, and when there are too many of them.

Both verdicts stay on the device, where the update obeys them; the host hears of a step's with the
step's other numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from olmo_distopt import StepGuard

from olmo_trainer.config import SkipGuard
from olmo_trainer.mesh import Mesh

PREFIX = "guard."  # of the names that its tensors have in a checkpoint


@dataclass(frozen=True)
class Skips:
    """What the guard did; plain values, the same on every rank."""

    reasons: tuple[str, ...] = ()  # why this step was left out; empty = it was not
    total: int = 0  # steps left out so far, those before a resume included
    in_a_row: int = 0  # up to this step, in this process


class Guard:
    """A `StepGuard` over the world that also counts on the host.

    Its verdict stays on the device, so that neither optimizer nor host need wait for it.
    """

    def __init__(self, config: SkipGuard, mesh: Mesh) -> None:
        self._guard = StepGuard(
            window=config.window,
            least_history=config.least_history,
            limit=config.limit,
            group=mesh.world_group,
        )
        self._found = torch.zeros(0)
        self._in_a_row = 0

    def check(self, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Return whether to skip this step, 0-d bool on the device; collective over the world.

        Args:
            loss: Of the global batch, 0-d.
            norm: Of its gradient, 0-d.
        """
        before = self._counts()
        skip = self._guard.check(loss, norm)
        # The counts move to the device of the loss in the first check.
        self._found = self._counts() - before.to(loss.device)
        return skip

    def verdict(self) -> torch.Tensor:
        """Return what the last `check` decided, (R + 1,) int64 on the device, for `report`."""
        return torch.cat([self._found, self._guard.num_skipped[None]])

    def report(self, verdict: Sequence[float]) -> Skips:
        """Return a `verdict` in words; called once a step, in the order of the steps."""
        *found, total = verdict
        names = self._guard.num_by_reason
        reasons = tuple(name for name, count in zip(names, found, strict=True) if count)
        self._in_a_row = self._in_a_row + 1 if reasons else 0
        return Skips(reasons, round(total), self._in_a_row)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the live tensors that a checkpoint holds, flat, by names that begin with `guard.`.

        They are views: to load into them is to load the guard.
        """
        state = self._guard.state_dict()
        return {name: each.view(-1) if each.ndim else each for name, each in state.items()}

    def _counts(self) -> torch.Tensor:
        return torch.stack(list(self._guard.num_by_reason.values()))


class Breaker:
    """Without a guard: from the first gradient that is not finite on, no step is taken.

    The run ends there, but on a GPU the host hears of it when the next step is under way.
    """

    def __init__(self) -> None:
        self._open: torch.Tensor | None = None

    def check(self, norm: torch.Tensor) -> torch.Tensor:
        """Return whether to hold back this step, 0-d bool on the device of the gradient `norm`."""
        bad = ~norm.isfinite()
        self._open = bad if self._open is None else self._open | bad
        return self._open
