"""The data of a run, and a step's share for each data replica.

A step has one global batch. Replica r of R takes the r-th contiguous share of it and cuts that into
A microbatches, so

    concatenate(microbatches(replica r) for r in 0..R-1) = global batch,   for every R and A

and a run on another layout sees the same tokens in the same steps.

Shapes: B sequences, S sequence length.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from olmo_trainer.data.batch_warmup import BatchWarmup
from olmo_trainer.data.batches import Batch
from olmo_trainer.data.joined import JoinedDataset
from olmo_trainer.data.order import Share, TrainOrder
from olmo_trainer.data.parts import Cut, Part, cut_text, cut_token_files
from olmo_trainer.data.repeats import RepeatFilter
from olmo_trainer.text import (
    ByteTokenizer,
    Source,
    TokenFiles,
    Tokenizer,
    Vocabulary,
    shared_vocabulary,
)

_BYTES = ByteTokenizer()


@dataclass(frozen=True, slots=True)
class Ingredient:
    """A source of a mixture.

    Attributes:
        source: Where its text or its tokens are.
        weight: Its part of the sequences, relative to the other sources'; above 0.
        max_passes: How often it may be read, above 0; `None` = without end.
    """

    source: Source | TokenFiles
    weight: float = 1.0
    max_passes: float | None = None


@dataclass(frozen=True, eq=False)
class TrainData:
    """All the data of a run; `load` and `mix` make it.

    Every process holds all of it (files as memory maps) and takes its share by arithmetic, so that
    no data moves between them. `fingerprint` must then be the same everywhere, and after a resume.

    Attributes:
        parts: The sources, at least one.
        order: Which training sequences each step takes.
        separate_documents: Whether batches number their documents, for attention within each.
        repeats: Which training sequences are left out as padding; `None` = none.
    """

    parts: Sequence[Part]
    order: TrainOrder
    separate_documents: bool = False
    repeats: RepeatFilter | None = None
    vocabulary: Vocabulary = field(init=False)

    def __post_init__(self) -> None:
        named = [(part.name or "the source", part.vocabulary) for part in self.parts]
        object.__setattr__(self, "vocabulary", shared_vocabulary(named))

    @classmethod
    def load(
        cls,
        source: Source | TokenFiles,
        *,
        sequence_length: int,
        batch_sequences: int,
        seed: int,
        heldout_fraction: float = 0.05,
        tokenizer: Tokenizer = _BYTES,
        max_passes: float | None = None,
        separate_documents: bool = False,
        repeats: RepeatFilter | None = None,
    ) -> "TrainData":
        """Read a source, hold a part of it out, and cut both sides into sequences.

        Args:
            source: Where the text or the tokens come from.
            sequence_length: S, predictions in a sequence, at least 1.
            batch_sequences: Sequences of a step over all replicas, at least 1.
            seed: Decides the split, the packing and the order.
            heldout_fraction: Of the documents, rounded up (of a token file: of its tokens, rounded
                to documents); in (0, 1).
            tokenizer: Of text; bytes unless given.
            max_passes: How often the source may be read; `None` = without end.
            separate_documents: Number the documents of each batch.
            repeats: Leave out training sequences that repeat themselves.

        Raises:
            ValueError: The source has no text or too few documents, or a number is out of range.
        """
        return cls.mix(
            {"": Ingredient(source, max_passes=max_passes)},
            sequence_length=sequence_length,
            batch_sequences=batch_sequences,
            seed=seed,
            heldout_fraction=heldout_fraction,
            tokenizer=tokenizer,
            separate_documents=separate_documents,
            repeats=repeats,
        )

    @classmethod
    def mix(
        cls,
        ingredients: Mapping[str, Ingredient],
        *,
        sequence_length: int,
        batch_sequences: int,
        seed: int,
        heldout_fraction: float = 0.05,
        tokenizer: Tokenizer = _BYTES,
        separate_documents: bool = False,
        repeats: RepeatFilter | None = None,
        batch_warmup: BatchWarmup | None = None,
    ) -> "TrainData":
        """Mix sources, each named and with a held-out part of its own; else as `load`.

        `batch_warmup` says how the batch grows in the first steps; `None` = it is whole from the
        first.

        Raises:
            ValueError: As `load`; or there is no source, or their vocabularies differ.
        """
        cut = Cut(sequence_length, heldout_fraction, seed)
        parts = [
            cut_token_files(name, each.source, cut)
            if isinstance(each.source, TokenFiles)
            else cut_text(name, each.source, tokenizer, cut)
            for name, each in ingredients.items()
        ]
        shares = [
            Share(part.num_sequences, part.name, each.weight, each.max_passes)
            for part, each in zip(parts, ingredients.values(), strict=True)
        ]
        order = TrainOrder(shares, batch_sequences, seed, batch_warmup)
        return cls(parts, order, separate_documents, repeats)

    @cached_property
    def train(self) -> JoinedDataset:
        """The sequences to train on, source after source."""
        return JoinedDataset([dataset for part in self.parts for dataset in part.train])

    @cached_property
    def heldout(self) -> JoinedDataset:
        """The sequences held out, source after source."""
        return JoinedDataset([dataset for part in self.parts for dataset in part.heldout])

    @cached_property
    def heldout_by_source(self) -> dict[str, JoinedDataset]:
        """The sequences held out of each source, by its name."""
        return {part.name: JoinedDataset(part.heldout) for part in self.parts}

    @property
    def num_documents(self) -> int | None:
        """Documents of all sources, held-out ones too; `None` when a source does not say."""
        numbers = [part.num_documents for part in self.parts if part.num_documents is not None]
        return sum(numbers) if len(numbers) == len(self.parts) else None

    @property
    def skipped(self) -> dict[str, str]:
        """What the sources left out: its id -> the reason."""
        return {name: reason for part in self.parts for name, reason in part.skipped.items()}

    def describe(self, num_steps: int) -> str:
        """Say in some words what there is, and how often `num_steps` steps read it."""
        documents = self.num_documents
        counted = "" if documents is None else f"{documents:,} documents, "
        words = ", ".join(
            f"{name} {passes:.2f}" if name else f"{passes:.2f}"
            for name, passes in self.order.passes(num_steps).items()
        )
        return (
            f"{counted}{len(self.train):,} sequences of {self.train.sequence_length} "
            f"(passes in {num_steps:,} steps: {words})"
        )

    def global_batch(self, step: int) -> Batch:
        """Return what all replicas together train on in `step` (0 = the first)."""
        return self._gather(self.order.sequences(step))

    def _gather(self, sequences_B: NDArray[np.int64]) -> Batch:
        return Batch.gather(
            self.train,
            sequences_B,
            separate_documents=self.separate_documents,
            repeats=self.repeats,
        )

    def microbatches(
        self, step: int, *, num_replicas: int, replica: int, accumulation: int
    ) -> list[Batch]:
        """Return the share of one data replica in `step`.

        Args:
            step: 0 = the first.
            num_replicas: R, how many share the global batch.
            replica: Which of them, in [0, R).
            accumulation: A, microbatches of a replica in a step of the whole batch, at least 1.

        Returns:
            A batches of `batch_sequences / (R * A)` sequences each; fewer while the batch grows.

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
        each = self.order.batch_sequences // (num_replicas * accumulation)
        if self.order.size(step) % (num_replicas * each):
            raise ValueError(
                f"the batch of step {step} ({self.order.size(step)} sequences) must be whole "
                f"microbatches of `num_replicas` * {each}; raise `accumulation`."
            )
        sequences_RAB = self.order.sequences(step).reshape(num_replicas, -1, each)
        return [self._gather(sequences_B) for sequences_B in sequences_RAB[replica]]

    def heldout_batches(
        self,
        batch_sequences: int,
        *,
        num_replicas: int,
        replica: int,
        limit_sequences: int | None = None,
        source: str | None = None,
    ) -> Iterator[Batch]:
        """Return the share of one data replica in the held-out sequences.

        Every sequence comes exactly once over all replicas. Sequences of padding fill the end, so
        that each replica has the same number of batches of the same size, and collectives match.
        Repeats are kept: what a model is measured on does not depend on a filter.

        Args:
            batch_sequences: Sequences of one batch of one replica, at least 1.
            num_replicas: How many share the sequences.
            replica: Which of them, in [0, num_replicas).
            limit_sequences: Take only so many, at least 1: as great a part of every file.
            source: The name of a source of the mixture; `None` = all of them.

        Returns:
            An iterator; the arguments are checked before the first batch is asked for.

        Raises:
            ValueError: A number is out of range, or there is no such source.
        """
        _check_replica(num_replicas, replica)
        if batch_sequences < 1:
            raise ValueError(f"`batch_sequences` must be at least 1, got {batch_sequences}.")
        if limit_sequences is not None and limit_sequences < 1:
            raise ValueError(
                f"`limit_sequences` must be at least 1, got {limit_sequences}; leave it out to "
                "take all."
            )
        if source is not None and source not in self.heldout_by_source:
            raise ValueError(
                f"`source` must be one of {', '.join(map(repr, self.heldout_by_source))}, got "
                f"{source!r}."
            )
        heldout = self.heldout if source is None else self.heldout_by_source[source]
        sequences = heldout.spread[:limit_sequences]
        padding = -len(sequences) % (num_replicas * batch_sequences)
        sequences = np.pad(sequences, (0, padding), constant_values=-1)
        sequences_NRB = sequences.reshape(-1, num_replicas, batch_sequences)
        return (
            Batch.gather(heldout, sequences_B, separate_documents=self.separate_documents)
            for sequences_B in sequences_NRB[:, replica]
        )

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits that change with anything that decides the tokens of a step.

        That is: the text, the vocabulary, the split, the sequence length, the batch size and its
        warm-up, the mixture, the filter, the documents' separation and the seed. Not how many
        passes are allowed, which only ends a run. A resume compares it, and refuses data in which
        its step number means another place.
        """
        digest = hashlib.blake2b(digest_size=16)
        order = self.order
        parts = [self.vocabulary, order.batch_sequences, order.seed, order.quotas]
        parts += [self.separate_documents, self.repeats]
        parts += [order.warmup] if order.warmup is not None else []
        parts += [(part.name, part.num_sequences) for part in self.parts]
        for side in (self.train, self.heldout):
            parts.append(side.digests())
        digest.update("\0".join(map(str, parts)).encode())
        return digest.hexdigest()


def _check_replica(num_replicas: int, replica: int) -> None:
    if not 0 <= replica < num_replicas:
        raise ValueError(
            f"`replica` must be in [0, `num_replicas`={num_replicas}), got {replica}; replicas are "
            "counted from 0."
        )
