"""Which sequences a step trains on: a function of the step, with nothing to save or to restore.

Epoch e visits the `n` sequences in a permutation that (seed, e) decides. The epochs, one after the
other, make an endless list, and step s takes

    positions [s*B, (s+1)*B) of permutation(seed, 0) + permutation(seed, 1) + ...

A batch may cross the end of an epoch, so none is short and no sequence is left over: each comes
exactly once an epoch. The list knows no ranks, microbatches or workers. That makes a resume
(`step` is all it needs) and a change of layout safe by construction.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from olmo_trainer.data.seeded import seeded_permutation


@dataclass(frozen=True, slots=True)
class TrainOrder:
    """The order of training.

    Attributes:
        num_sequences: n, the sequences of an epoch.
        batch_sequences: B, the sequences of a step over all ranks; it may exceed n, and a step then
            sees a sequence more than once.
        seed: The seed of the run.

    Raises:
        ValueError: A number is below 1.
    """

    num_sequences: int
    batch_sequences: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_sequences < 1:
            raise ValueError(f"`num_sequences` must be at least 1, got {self.num_sequences}.")
        if self.batch_sequences < 1:
            raise ValueError(f"`batch_sequences` must be at least 1, got {self.batch_sequences}.")

    def sequences(self, step: int) -> NDArray[np.int64]:
        """Return the sequences of the global batch of `step`, int64 (B,) in [0, n).

        Raises:
            ValueError: `step` is negative.
        """
        if step < 0:
            raise ValueError(f"`step` must be at least 0, got {step}; the first step is 0.")
        position, end = step * self.batch_sequences, (step + 1) * self.batch_sequences
        pieces: list[NDArray[np.int64]] = []
        while position < end:
            epoch, start = divmod(position, self.num_sequences)
            permutation = _epoch_permutation(self.num_sequences, self.seed, epoch)
            pieces.append(permutation[start : start + end - position])
            position += len(pieces[-1])
        return np.concatenate(pieces)


@lru_cache(maxsize=2)
def _epoch_permutation(num_sequences: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return seeded_permutation(num_sequences, "train order", seed, epoch)
