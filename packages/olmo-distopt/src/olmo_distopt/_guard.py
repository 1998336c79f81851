"""Skipping steps that would do harm: a loss or gradient norm that is not finite, or spikes.

Of each watched number the guard keeps its last `window` finite values. A value x spikes when

    x > median + limit * deviation,    deviation = max(1.4826 MAD, 0.01 |median|)

MAD is the median of |value - median|; the factor makes it the standard deviation of normal noise.
Both medians are the lower one of an even number. They ignore the very spikes that would raise a
mean and its deviation. The floor keeps a run whose numbers hardly move from calling 1 % a spike.
Only rises spike. A finite value enters the window whether or not it was skipped, so a lasting
change of level is accepted after about half a window; a non-finite one never enters.

Everything stays on the device: the verdict is a 0-d tensor that `step(skip=...)` obeys there, and
one all-reduce makes it the same on every process, also when each passes a loss of its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ._arguments import require_count, require_positive, require_zero_d
from ._collective import is_together

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NORMAL_MAD = 1.4826
LEAST_DEVIATION = 0.01

REASONS = ("loss not finite", "norm not finite", "loss spikes", "norm spikes")


class StepGuard:
    """Says on the device, and alike on all processes, whether to skip a step.

    Args:
        window: values remembered of each number, >= 2.
        least_history: values below which nothing counts as a spike, in [2, window].
        limit: deviations above the median that make a spike, > 0; `math.inf` looks for non-finite
            values alone.
        group: the processes that must agree: all that take the step. None: the default group if
            torch.distributed is initialised, else this process alone.

    Raises:
        ValueError: a number out of range.

    Note:
        State: `2 * window` float64 on the device of the first loss.
    """

    def __init__(
        self,
        *,
        window: int = 128,
        least_history: int = 32,
        limit: float = 6.0,
        group: ProcessGroup | None = None,
    ) -> None:
        require_count("window", window, 2)
        if not 2 <= least_history <= window:
            raise ValueError(
                f"`least_history` must be in [2, `window`={window}], got {least_history}."
            )
        require_positive("limit", limit)
        self._least_history, self._limit, self._group = least_history, limit, group
        self._history = torch.full((2, window), math.nan, dtype=torch.float64)
        self._num_seen = torch.zeros(2, dtype=torch.int64)  # finite values of each number
        self._num_by_reason = torch.zeros(len(REASONS), dtype=torch.int64)
        self._num_skipped = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def check(self, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Return whether to skip this step, and remember its numbers.

        One collective, on every process of the group, once a step.

        Args:
            loss: of the step, 0-d floating; each process's own or the global one.
            norm: of `global_grad_norm`, 0-d floating.

        Returns:
            0-d bool on the device of `loss`, the same on every process: for `step(skip=...)`.

        Raises:
            TypeError: `loss` or `norm` is no tensor.
            ValueError: `loss` or `norm` is not 0-d.
        """
        require_zero_d("loss", loss)
        require_zero_d("norm", norm)
        self._move_to(loss.device)
        values = torch.stack([loss.double(), norm.to(loss.device, torch.float64)])
        finite = values.isfinite()
        reasons = torch.cat([~finite, finite & self._spikes(values)]).to(torch.int64)
        if is_together():
            dist.all_reduce(reasons, op=dist.ReduceOp.MAX, group=self._group)
        self._remember(values, finite)
        skip = reasons.any()
        self._num_by_reason += reasons
        self._num_skipped += skip
        return skip

    @property
    def num_skipped(self) -> torch.Tensor:
        """Steps skipped so far, 0-d int64 on the device."""
        return self._num_skipped

    @property
    def num_by_reason(self) -> dict[str, torch.Tensor]:
        """Steps skipped so far by reason, 0-d int64 on the device; a step may have several."""
        return dict(zip(REASONS, self._num_by_reason, strict=True))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the live tensors of the state, for torch.distributed.checkpoint to save or fill.

        The windows are this process's own: with a loss of each process's own, a checkpoint keeps
        one process's. Pass the global loss where that matters.
        """
        return {
            "guard.history": self._history,
            "guard.num_seen": self._num_seen,
            "guard.num_by_reason": self._num_by_reason,
            "guard.num_skipped": self._num_skipped,
        }

    def _spikes(self, values: torch.Tensor) -> torch.Tensor:
        window = self._history.shape[1]
        count = self._num_seen.clamp(max=window)
        median = _lower_median(self._history, count)
        mad = _lower_median((self._history - median[:, None]).abs(), count)
        deviation = torch.maximum(NORMAL_MAD * mad, LEAST_DEVIATION * median.abs())
        return (values > median + self._limit * deviation) & (count >= self._least_history)

    def _remember(self, values: torch.Tensor, finite: torch.Tensor) -> None:
        window = self._history.shape[1]
        place = torch.arange(window, device=values.device) == (self._num_seen % window)[:, None]
        torch.where(place & finite[:, None], values[:, None], self._history, out=self._history)
        self._num_seen += finite

    def _move_to(self, device: torch.device) -> None:
        if self._history.device != device:
            self._history = self._history.to(device)
            self._num_seen = self._num_seen.to(device)
            self._num_by_reason = self._num_by_reason.to(device)
            self._num_skipped = self._num_skipped.to(device)


def _lower_median(values: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return the lower median of the first `count` (K,) numbers of each row; NaN sorts last."""
    ordered = values.sort(dim=1).values
    return ordered.gather(1, ((count - 1).clamp(min=0) // 2)[:, None])[:, 0]
