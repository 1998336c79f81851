"""Finding sequences that say one thing over and over, which teach a model to do the same.

A sequence is repetitive when some pattern of p tokens, p from 1 to `max_period`, stands in it at
least `max_count` times in a row:

    x[t] = x[t - p]   for (max_count - 1) p places t in a row

The defaults, 13 and 32, are those that OLMo-core's pretraining scripts give its instance filter. A
repetitive sequence keeps its place in the order and is trained on as padding: not read, not routed,
not predicted, and not counted in what the loss is divided by (counted, it would make the loss read
low).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RepeatFilter:
    """When a sequence repeats itself too much.

    Attributes:
        max_period: The longest pattern looked for, in tokens, at least 1.
        max_count: How often in a row a pattern must stand to be too much, at least 2.

    Raises:
        ValueError: A number is out of range.
    """

    max_period: int = 13
    max_count: int = 32

    def __post_init__(self) -> None:
        if self.max_period < 1:
            raise ValueError(f"`max_period` must be at least 1, got {self.max_period}.")
        if self.max_count < 2:
            raise ValueError(f"`max_count` must be at least 2, got {self.max_count}.")

    def repetitive(
        self, tokens_BS: NDArray[np.int64], mask_BS: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Return which sequences are repetitive, bool (B,).

        Args:
            tokens_BS: Ids.
            mask_BS: True = a real token; padding repeats nothing.
        """
        found_B = np.zeros(len(tokens_BS), np.bool_)
        length = tokens_BS.shape[1]
        for period in range(1, self.max_period + 1):
            needed = (self.max_count - 1) * period
            if needed > length - period:
                break
            same = (tokens_BS[:, period:] == tokens_BS[:, :-period]) & mask_BS[:, period:]
            # `needed` in a row are equal where the running sum grew by `needed`.
            total = np.pad(np.cumsum(same, axis=1), ((0, 0), (1, 0)))
            found_B |= (total[:, needed:] - total[:, :-needed] == needed).any(axis=1)
        return found_B
