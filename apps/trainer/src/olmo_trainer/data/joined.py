"""Many streams as one set of sequences: the files of a source, the sources of a mixture."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from olmo_trainer.data.packing import PackedDataset


class JoinedDataset:
    """Datasets one after the other; a sequence is of one of them.

    Args:
        parts: At least one, of one sequence length and padding.

    Raises:
        ValueError: There is none, or they differ.
    """

    def __init__(self, parts: Sequence[PackedDataset]) -> None:
        if not parts:
            raise ValueError("at least one dataset must be joined, got none.")
        if len({(part.sequence_length, part.pad_id) for part in parts}) > 1:
            raise ValueError("joined datasets must share one sequence length and padding.")
        self.parts = tuple(parts)
        self.sequence_length = parts[0].sequence_length
        self.pad_id = parts[0].pad_id
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        """The number of sequences."""
        return int(self._ends[-1])

    @property
    def num_targets(self) -> int:
        """How many tokens are predicted."""
        return sum(part.num_targets for part in self.parts)

    @cached_property
    def spread(self) -> NDArray[np.int64]:
        """The sequences in an order whose every beginning takes a fair share of each part.

        int64 (len,): sequence k of the n of a part stands at (k + 1/2) / n of the whole.
        """
        places = [(np.arange(len(part)) + 0.5) / len(part) for part in self.parts]
        return np.argsort(np.concatenate(places), kind="stable")

    def windows(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return what is read, what is to be predicted, and where the two are real.

        As `PackedDataset.windows`: int64 (B,) in [-1, len) to int64, int64 and bool (B, S).

        Raises:
            IndexError: An index is out of range.
        """
        if indices.size and not (indices.min() >= -1 and indices.max() < len(self)):
            wrong = indices.min() if indices.min() < -1 else indices.max()
            raise IndexError(f"a sequence index must be in [-1, {len(self)}), got {wrong}.")
        shape = (len(indices), self.sequence_length)
        inputs, targets = np.full(shape, self.pad_id), np.full(shape, self.pad_id)
        mask = np.zeros(shape, np.bool_)
        holders = np.searchsorted(self._ends, indices, side="right")
        for holder in np.unique(holders[indices >= 0]).tolist():
            part = self.parts[holder]
            rows = np.flatnonzero((holders == holder) & (indices >= 0))
            first = self._ends[holder] - len(part)
            inputs[rows], targets[rows], mask[rows] = part.windows(indices[rows] - first)
        return inputs, targets, mask

    def digests(self) -> list[str]:
        """Return the digest of each part."""
        return [part.digest() for part in self.parts]
