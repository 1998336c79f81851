"""Sequences to the tensors that a model reads.

Documents of a sequence: attention may be kept within each. A document then begins with the end of
the one before it, so that its first token is predicted from that end alone and no prediction sees
another document. (OLMo-core counts the end to the document that it closes; the two differ in what
the first token of a document sees.)

Shapes: B sequences, S sequence length.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from olmo_trainer.data.repeats import RepeatFilter

IGNORE_INDEX = -100  # what torch's cross_entropy leaves out


class SequenceDataset(Protocol):
    """Sequences by number; `PackedDataset` and `JoinedDataset` are two."""

    pad_id: int

    def __len__(self) -> int: ...

    def windows(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return inputs, targets and mask of some sequences, each (B, S)."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some sequences, ready for the model.

    Attributes:
        tokens_BS: What is read, int64; the padding id where nothing is real.
        targets_BS: The token that follows, int64; `IGNORE_INDEX` where nothing is real.
        mask_BS: bool; True = a real token that has a target, False = padding.
        documents_BS: int32, the number of the token's document in its sequence, from 0 or 1,
            never falling; padding has numbers of its own. `None` = attend to the whole sequence.
            Of the whole sequence where `context_part` has cut the others.
        document_lengths: Of the documents in it, their tokens that have a target, in any order.
            Stays behind with the host: what `context_part` and `to` return has none.
    """

    tokens_BS: Tensor
    targets_BS: Tensor
    mask_BS: Tensor
    documents_BS: Tensor | None = None
    document_lengths: tuple[int, ...] = ()

    @classmethod
    def gather(
        cls,
        dataset: SequenceDataset,
        indices: NDArray[np.int64],
        *,
        separate_documents: bool = False,
        repeats: RepeatFilter | None = None,
    ) -> "Batch":
        """Gather sequences on the CPU.

        Args:
            dataset: Where they are.
            indices: int64 (B,) in [-1, len), -1 = all padding.
            separate_documents: Number the documents; their end is the padding id of `dataset`.
            repeats: Turns sequences that repeat themselves into padding.
        """
        inputs, targets, mask = dataset.windows(indices)
        if repeats is not None:
            repetitive_B = repeats.repetitive(inputs, mask)
            inputs[repetitive_B], mask[repetitive_B] = dataset.pad_id, False
        targets = np.where(mask, targets, IGNORE_INDEX)
        columns = [torch.from_numpy(each) for each in (inputs, targets, mask)]
        if not separate_documents:
            return cls(*columns)
        documents = np.cumsum(inputs == dataset.pad_id, axis=1, dtype=np.int32)
        # Numbers that differ between sequences too; padding counts nowhere.
        numbers = documents + np.arange(len(documents))[:, None] * (inputs.shape[1] + 1)
        lengths = np.unique(numbers[mask], return_counts=True)[1]
        return cls(*columns, torch.from_numpy(documents), tuple(lengths.tolist()))

    def context_part(self, part: int, num_parts: int) -> "Batch":
        """Return the positions of one context rank: equal parts of each sequence, in order.

        Documents stay whole, for attention sees all positions.

        Raises:
            ValueError: The sequence does not divide.
        """
        length = self.tokens_BS.shape[1]
        if length % num_parts:
            raise ValueError(
                f"`num_parts` ({num_parts}) must divide the sequence length ({length})."
            )
        share = length // num_parts
        columns = (self.tokens_BS, self.targets_BS, self.mask_BS)
        return Batch(
            *(each.narrow(1, part * share, share).contiguous() for each in columns),
            documents_BS=self.documents_BS,
        )

    @property
    def num_targets(self) -> int:
        """How many tokens are to be predicted; waits for the device."""
        return int(self.mask_BS.sum())

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on `device`; the host does not wait for a GPU.

        On its way there it lies in pinned memory, which alone is copied without waiting and which
        torch's allocator gives out again only when the copy is done.
        """
        device = torch.device(device)

        def moved(column: Tensor) -> Tensor:
            if device.type == "cuda" and column.device.type == "cpu":
                column = column.pin_memory()
            return column.to(device, non_blocking=True)

        return Batch(
            *(moved(each) for each in (self.tokens_BS, self.targets_BS, self.mask_BS)),
            documents_BS=None if self.documents_BS is None else moved(self.documents_BS),
        )
