"""Documents to sequences of one length: split, shuffle, join, cut.

Split: the documents with the smallest hash of (seed, id) are held out, `ceil(fraction * number)` of
them. Whole documents move, so nothing held out has a neighbour in training.

Pack: the documents of a side, in an order that the seed decides, make one stream

    x = [end] + document_1 + [end] + document_2 + [end] + ...        N tokens

and sequence i is the window `x[i*S : i*S + S + 1]`: its first S tokens are read, its last S are
predicted. Windows overlap by one token, so that every token after the first `end` is predicted
exactly once, whatever S. The last window may be short; it is padded, never dropped.

Shapes: B sequences, S sequence length.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from olmo_trainer.data.seeded import seeded_hash
from olmo_trainer.text import Document, Tokenizer, token_dtype


def split_documents(
    documents: Sequence[Document], *, seed: int, heldout_fraction: float = 0.05
) -> tuple[list[Document], list[Document]]:
    """Divide documents into those to train on and those held out.

    Args:
        documents: In any order; it does not matter to the split.
        seed: The seed of the run.
        heldout_fraction: Of the number of documents, in (0, 1); rounded up to whole documents.

    Returns:
        The training documents and the held-out documents, each sorted by id.

    Raises:
        ValueError: The fraction is out of range, an id is given twice, or a side is empty.
    """
    if not 0 < heldout_fraction < 1:
        raise ValueError(f"`heldout_fraction` must be between 0 and 1, got {heldout_fraction}.")
    if len({document.id for document in documents}) < len(documents):
        raise ValueError("document ids must differ, got one twice; name each document once.")
    num_heldout = math.ceil(heldout_fraction * len(documents))
    if not 0 < num_heldout < len(documents):
        raise ValueError(
            "at least one document must be held out and one left to train on, got "
            f"{len(documents)} in all with `heldout_fraction`={heldout_fraction}; give "
            "more files (a file is a document; a long one can be cut)"
            + (", or a smaller fraction." if len(documents) > 1 else ".")
        )
    shuffled = _shuffled(documents, "held out", seed)
    heldout, train = shuffled[:num_heldout], shuffled[num_heldout:]
    return sorted(train, key=lambda d: d.id), sorted(heldout, key=lambda d: d.id)


def token_stream(
    documents: Iterable[Document], tokenizer: Tokenizer, *, seed: int
) -> NDArray[np.unsignedinteger]:
    """Join documents, shuffled by the seed, into one stream of tokens.

    Returns:
        uint16 or uint32 (N,), as the vocabulary needs: an end of document, then each document with
        an end after it.
    """
    end = np.array([tokenizer.end_of_document], dtype=token_dtype(tokenizer.vocab_size))
    pieces = [end]
    for document in _shuffled(documents, "packing", seed):
        pieces += [tokenizer.encode(document.text).astype(end.dtype), end]
    return np.concatenate(pieces)


def _shuffled(documents: Iterable[Document], purpose: str, seed: int) -> list[Document]:
    return sorted(documents, key=lambda d: (seeded_hash(purpose, seed, d.id), d.id))


@dataclass(frozen=True, slots=True, eq=False)
class PackedDataset:
    """A stream of tokens, cut into sequences.

    Attributes:
        tokens: The stream, integers (N,), at least two.
        sequence_length: S, the number of predictions in a full sequence.
        pad_id: The token that stands where nothing is.
        source_digest: Of the file that `tokens` are a part of; empty = they are hashed themselves.

    Raises:
        ValueError: The stream is not one row of two or more, or the length is below 1.
        TypeError: The tokens are not integers.
    """

    tokens: NDArray[np.integer]
    sequence_length: int
    pad_id: int
    source_digest: str = ""

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise ValueError(f"`sequence_length` must be at least 1, got {self.sequence_length}.")
        if not np.issubdtype(self.tokens.dtype, np.integer):
            raise TypeError(f"`tokens` must be integers, got {self.tokens.dtype}.")
        if self.tokens.ndim != 1 or len(self.tokens) < 2:
            raise ValueError(
                f"`tokens` must be one row of at least 2, one to read and one to predict, got "
                f"shape {self.tokens.shape}."
            )

    def __len__(self) -> int:
        """The number of sequences, the padded one included."""
        return math.ceil(self.num_targets / self.sequence_length)

    @property
    def num_targets(self) -> int:
        """How many tokens are predicted: all but the first."""
        return len(self.tokens) - 1

    def digest(self) -> str:
        """Return 32 hex digits that change with the tokens, their cut and their padding."""
        digest = hashlib.blake2b(digest_size=16)
        parts = (self.sequence_length, self.pad_id, len(self.tokens), self.source_digest)
        digest.update("\0".join(map(str, parts)).encode())
        if not self.source_digest:
            digest.update(self.tokens.astype("<i8" if self.tokens.itemsize > 2 else "<u2").data)
        return digest.hexdigest()

    def sequence(self, index: int) -> NDArray[np.integer]:
        """Return the real tokens of one sequence, (n,) with n in [2, S + 1]: the last is short.

        Raises:
            IndexError: `index` is not in [0, len).
        """
        self._check(index, index, lowest=0)
        start = index * self.sequence_length
        return self.tokens[start : start + self.sequence_length + 1]

    def windows(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return what is read, what is to be predicted, and where the two are real.

        Args:
            indices: Sequences, int64 (B,) in [-1, len); -1 is a sequence of padding.

        Returns:
            Inputs and targets, int64 (B, S) with `pad_id` where nothing is real, and the mask, bool
            (B, S).

        Raises:
            IndexError: An index is out of range.
        """
        if indices.size:
            self._check(int(indices.min()), int(indices.max()), lowest=-1)
        starts = indices[:, None] * self.sequence_length
        positions = starts + np.arange(1, self.sequence_length + 1)  # (B, S), of the targets
        mask = (indices[:, None] >= 0) & (positions < len(self.tokens))
        positions[~mask] = 1
        inputs = np.where(mask, self.tokens[positions - 1], self.pad_id)
        targets = np.where(mask, self.tokens[positions], self.pad_id)
        return inputs.astype(np.int64, copy=False), targets.astype(np.int64, copy=False), mask

    def _check(self, smallest: int, largest: int, *, lowest: int) -> None:
        if smallest < lowest or largest >= len(self):
            index = smallest if smallest < lowest else largest
            raise IndexError(f"a sequence index must be in [{lowest}, {len(self)}), got {index}.")
