"""An alarm over many steps: the balance loss falls while the load gets worse.

A loss below 1 proves token gerrymandering at once. The way there is visible earlier: over a window
of steps the loss goes down and the imbalance goes up, which no loss that measures balance could do.
Shapes: any shape of layers, here called L.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ._checks import check_positive


class GerrymanderAlarm(nn.Module):
    """Compare the newer half of a window of steps with its older half, on the device.

    Args:
        window: steps, at least 2. Long enough that the mean of a half is quiet, short enough that a
            trend shows.
        shape: of what `update` takes: () for one layer, (layers,) for many at once.
        least_fall: the mean loss must fall by more than this, absolutely, 1 being balanced.
        least_rise: the mean imbalance must rise by more than this fraction of itself.
        device: of the buffers.

    Attributes:
        history_2WL: float32, the losses and imbalances of the window, oldest first; NaN before the
            first steps. Saved with the model, so that a resumed run keeps its window.

    Raises:
        TypeError: `window` is not an int.
        ValueError: an argument is out of range.
    """

    history_2WL: Tensor

    def __init__(
        self,
        window: int = 200,
        *,
        shape: Sequence[int] = (),
        least_fall: float = 0.005,
        least_rise: float = 0.05,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_positive("window", window, least=2)
        for name, value in (("least_fall", least_fall), ("least_rise", least_rise)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"`{name}` must be finite and at least 0, got {value}.")
        self.least_fall = least_fall
        self.least_rise = least_rise
        history = torch.empty(2, window, *shape, dtype=torch.float32, device=device)
        self.register_buffer("history_2WL", history)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Forget all steps, in place: a start afresh, also after the meta device."""
        nn.init.constant_(self.history_2WL, math.nan)

    @torch.no_grad()
    def update(self, balance_loss: Tensor, imbalance: Tensor) -> Tensor:
        """Add a step and return whether the alarm is on.

        Args:
            balance_loss: of this step, `shape`; from a `LoadReport` or `BalanceReport`.
            imbalance: of this step, `shape`.

        Returns:
            bool, `shape`, on the device: the loss is below 1 while the load is uneven, or it fell
            over the window while the imbalance rose. The latter needs a full window without NaN.
            Nothing is read back.

        Raises:
            ValueError: a shape is not as above.
        """
        expected = self.history_2WL.shape[2:]
        for name, value in (("balance_loss", balance_loss), ("imbalance", imbalance)):
            if value.shape != expected:
                raise ValueError(
                    f"`{name}` must have shape {tuple(expected)}, got {tuple(value.shape)}."
                )
        # Not a ring: a position that the host counts would be lost when a run resumes.
        newest_21L = torch.stack([balance_loss, imbalance])[:, None].to(self.history_2WL.dtype)
        self.history_2WL.copy_(torch.cat([self.history_2WL[:, 1:], newest_21L], dim=1))
        half = self.history_2WL.shape[1] // 2
        old_loss, old_imbalance = self.history_2WL[:, :half].mean(1)
        new_loss, new_imbalance = self.history_2WL[:, half:].mean(1)
        falls = new_loss < old_loss - self.least_fall
        rises = new_imbalance > old_imbalance * (1 + self.least_rise)
        return (falls & rises) | is_gerrymandered(balance_loss, imbalance)

    def extra_repr(self) -> str:
        """Return what `repr` shows."""
        _, window, *shape = self.history_2WL.shape
        return (
            f"window={window}, shape={tuple(shape)}, least_fall={self.least_fall}, "
            f"least_rise={self.least_rise}"
        )


# The loss of float32 sums over tokens is exact to about this; closer to 1 is no evidence.
_ROUNDING = 1e-5


def is_gerrymandered(balance_loss: Tensor, imbalance: Tensor) -> Tensor:
    """Return where the loss is below 1 though the routes are uneven."""
    return (balance_loss < 1 - _ROUNDING) & (imbalance > 1 + _ROUNDING)
