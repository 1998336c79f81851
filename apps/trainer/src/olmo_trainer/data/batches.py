"""Sequences to the tensors of a step, and a step's share for each data replica.

A step has one global batch. Replica r of R takes the r-th contiguous share of it and cuts that into
A microbatches, so

    concatenate(microbatches(replica r) for r in 0..R-1) = global batch,   for every R and A

and a run on another layout sees the same tokens in the same steps.

Shapes: B sequences, S sequence length.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from olmo_trainer.data.order import TrainOrder
from olmo_trainer.data.packing import PackedDataset, split_documents, token_stream
from olmo_trainer.data.sources import Source
from olmo_trainer.data.tokens import ByteTokenizer, Tokenizer

IGNORE_INDEX = -100  # what torch's cross_entropy leaves out
_BYTES = ByteTokenizer()


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some sequences, ready for the model.

    Attributes:
        tokens_BS: What is read, int64; the padding id where nothing is real.
        targets_BS: The token that follows, int64; `IGNORE_INDEX` where nothing is real.
        mask_BS: bool; True = a real token that has a target, False = padding.
    """

    tokens_BS: Tensor
    targets_BS: Tensor
    mask_BS: Tensor

    @classmethod
    def gather(cls, dataset: PackedDataset, indices: NDArray[np.int64]) -> "Batch":
        """Gather sequences, int64 (B,) in [-1, len), -1 = all padding, on the CPU."""
        inputs, targets, mask = dataset.windows(indices)
        targets = np.where(mask, targets, IGNORE_INDEX)
        return cls(torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(mask))

    @property
    def num_targets(self) -> int:
        """How many tokens are to be predicted; waits for the device."""
        return int(self.mask_BS.sum())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """Return the batch on `device`."""
        return Batch(
            self.tokens_BS.to(device, non_blocking=non_blocking),
            self.targets_BS.to(device, non_blocking=non_blocking),
            self.mask_BS.to(device, non_blocking=non_blocking),
        )


@dataclass(frozen=True, eq=False)
class TrainData:
    """All the data of a run; `load` makes it.

    Every process holds all of it and takes its share by arithmetic, so that no data moves between
    them. `fingerprint` must then be the same everywhere, and after a resume.

    Attributes:
        train: The sequences to train on.
        heldout: The sequences held out.
        order: Which training sequences each step takes.
        tokenizer: What made the tokens.
        num_train_documents: Documents in `train`.
        num_heldout_documents: Documents in `heldout`.
        skipped: What the source left out: its id -> the reason.
    """

    train: PackedDataset
    heldout: PackedDataset
    order: TrainOrder
    tokenizer: Tokenizer
    num_train_documents: int
    num_heldout_documents: int
    skipped: Mapping[str, str]

    @classmethod
    def load(
        cls,
        source: Source,
        *,
        sequence_length: int,
        batch_sequences: int,
        seed: int,
        heldout_fraction: float = 0.05,
        tokenizer: Tokenizer = _BYTES,
    ) -> "TrainData":
        """Read a source, hold documents out, and pack both sides.

        Args:
            source: Where the text comes from.
            sequence_length: S, predictions in a sequence, at least 1.
            batch_sequences: Sequences of a step over all replicas, at least 1.
            seed: Decides the split, the packing and the order.
            heldout_fraction: Of the documents, in (0, 1), rounded up.
            tokenizer: Bytes unless given.

        Raises:
            ValueError: The source has no text or too few documents, or a number is out of range.
        """
        corpus = source.read()
        train, heldout = split_documents(
            corpus.documents, seed=seed, heldout_fraction=heldout_fraction
        )
        packed_train, packed_heldout = (
            PackedDataset(
                token_stream(documents, tokenizer, seed=seed),
                sequence_length,
                tokenizer.end_of_document,
            )
            for documents in (train, heldout)
        )
        order = TrainOrder(len(packed_train), batch_sequences, seed)
        return cls(
            packed_train, packed_heldout, order, tokenizer, len(train), len(heldout), corpus.skipped
        )

    def global_batch(self, step: int) -> Batch:
        """Return what all replicas together train on in `step` (0 = the first)."""
        return Batch.gather(self.train, self.order.sequences(step))

    def microbatches(
        self, step: int, *, num_replicas: int, replica: int, accumulation: int
    ) -> list[Batch]:
        """Return the share of one data replica in `step`.

        Args:
            step: 0 = the first.
            num_replicas: R, how many share the global batch.
            replica: Which of them, in [0, R).
            accumulation: A, microbatches of a replica a step, at least 1.

        Returns:
            A batches of `batch_sequences / (R * A)` sequences each.

        Raises:
            ValueError: A number is out of range, or the global batch does not divide.
        """
        _check_replica(num_replicas, replica)
        if accumulation < 1:
            raise ValueError(f"`accumulation` must be at least 1, got {accumulation}.")
        if self.order.batch_sequences % (num_replicas * accumulation):
            raise ValueError(
                f"`batch_sequences`={self.order.batch_sequences} must be a multiple of "
                f"`num_replicas` * `accumulation` = {num_replicas} * {accumulation}; change one of "
                "the three."
            )
        sequences_RAB = self.order.sequences(step).reshape(num_replicas, accumulation, -1)
        return [Batch.gather(self.train, sequences_B) for sequences_B in sequences_RAB[replica]]

    def heldout_batches(
        self,
        batch_sequences: int,
        *,
        num_replicas: int,
        replica: int,
        limit_sequences: int | None = None,
    ) -> Iterator[Batch]:
        """Return the share of one data replica in the held-out sequences.

        Every sequence comes exactly once over all replicas. Sequences of padding fill the end, so
        that each replica has the same number of batches of the same size, and collectives match.

        Args:
            batch_sequences: Sequences of one batch of one replica, at least 1.
            num_replicas: How many share the sequences.
            replica: Which of them, in [0, num_replicas).
            limit_sequences: Take only the first so many (their documents are shuffled); at least 1.

        Returns:
            An iterator; the arguments are checked before the first batch is asked for.

        Raises:
            ValueError: A number is out of range.
        """
        _check_replica(num_replicas, replica)
        if batch_sequences < 1:
            raise ValueError(f"`batch_sequences` must be at least 1, got {batch_sequences}.")
        if limit_sequences is not None and limit_sequences < 1:
            raise ValueError(
                f"`limit_sequences` must be at least 1, got {limit_sequences}; leave it out to "
                "take all."
            )
        sequences = np.arange(len(self.heldout))[:limit_sequences]
        padding = -len(sequences) % (num_replicas * batch_sequences)
        sequences = np.pad(sequences, (0, padding), constant_values=-1)
        sequences_NRB = sequences.reshape(-1, num_replicas, batch_sequences)
        return (
            Batch.gather(self.heldout, sequences_B) for sequences_B in sequences_NRB[:, replica]
        )

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits that change with anything that decides the tokens of a step.

        That is: the text, the tokenizer, the split, the sequence length, the batch size and the
        seed. A resume compares it, and refuses data in which its step number means another place.
        """
        digest = hashlib.blake2b(digest_size=16)
        tokenizer, order = self.tokenizer, self.order
        parts = [tokenizer.name, tokenizer.vocab_size, order.batch_sequences, order.seed]
        for side in (self.train, self.heldout):
            parts += [side.sequence_length, side.pad_id, len(side.tokens)]
        digest.update("\0".join(map(str, parts)).encode())
        for side in (self.train, self.heldout):
            digest.update(side.tokens.astype("<i8" if side.tokens.itemsize > 2 else "<u2").data)
        return digest.hexdigest()


def _check_replica(num_replicas: int, replica: int) -> None:
    if not 0 <= replica < num_replicas:
        raise ValueError(
            f"`replica` must be in [0, `num_replicas`={num_replicas}), got {replica}; replicas are "
            "counted from 0."
        )
