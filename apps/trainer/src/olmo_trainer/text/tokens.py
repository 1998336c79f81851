"""Text as numbers: what a tokenizer is, and the one that takes a token a byte.

    ids 0..255 = the bytes of the UTF-8 text, id 256 = end of document, so `vocab_size` = 257

Bytes need no training and no file, lose nothing, and make nats a token and nats a byte the same
number (but for the one end token a document).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What token ids mean, without the means to make them.

    Attributes:
        name: Tells it from any vocabulary in which an id means something else; enters the
            fingerprint of the data. Empty for token files that do not say.
        size: Ids are in [0, size), at most 2**32.
        end_of_document: The id after each document, also the id of padding.

    Raises:
        ValueError: A number is out of range.
    """

    name: str
    size: int
    end_of_document: int

    def __post_init__(self) -> None:
        if not 2 <= self.size <= 2**32:
            raise ValueError(f"a vocabulary must have 2 to 2**32 ids, got {self.size}.")
        if not 0 <= self.end_of_document < self.size:
            raise ValueError(
                f"the id of the end of a document must be in [0, {self.size}), the vocabulary, got "
                f"{self.end_of_document}; give the tokenizer's, or a larger vocabulary."
            )

    @classmethod
    def of(cls, tokenizer: "Tokenizer") -> "Vocabulary":
        """Return the vocabulary of a tokenizer."""
        return cls(tokenizer.name, tokenizer.vocab_size, tokenizer.end_of_document)


def shared_vocabulary(vocabularies: Sequence[tuple[str, Vocabulary]]) -> Vocabulary:
    """Return the vocabulary of texts that are to be trained on together.

    Files that name no vocabulary go with any that ends documents with the same id.

    Args:
        vocabularies: What to call a text in an error, and its vocabulary; at least one.

    Raises:
        ValueError: Two of them differ.
    """
    first_text, first = next((each for each in vocabularies if each[1].name), vocabularies[0])
    for text, vocabulary in vocabularies:
        named = bool(vocabulary.name)
        if vocabulary.end_of_document != first.end_of_document or (named and vocabulary != first):
            raise ValueError(
                f"all texts must share one vocabulary, got {vocabulary} in {text} and {first} in "
                f"{first_text}; prepare both with one tokenizer."
            )
    return first


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the smallest of little-endian uint16 and uint32 that holds every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class Tokenizer(Protocol):
    """What the data needs of a tokenizer; `ByteTokenizer` is one.

    Attributes:
        name: Tells it from any tokenizer that gives other ids; enters the fingerprint of the data.
        vocab_size: Ids are in [0, vocab_size), at most 2**32.
        end_of_document: The id after each document, also the id of padding.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def end_of_document(self) -> int: ...  # noqa: D102

    def encode(self, text: str) -> NDArray[np.unsignedinteger]:
        """Return the ids of a text, uint16 or uint32 (n,), without an end of document."""
        ...

    def encode_all(self, texts: Sequence[str]) -> Sequence[NDArray[np.unsignedinteger]]:
        """Return the ids of each text, as `encode` would."""
        ...

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of ids, integers (n,)."""
        ...


class ByteTokenizer:
    """One token a byte of UTF-8."""

    name = "utf-8 bytes"
    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> NDArray[np.uint16]:
        """Return the bytes of `text` as ids, uint16 (bytes,) in [0, 255].

        Raises:
            UnicodeEncodeError: `text` holds a lone surrogate, which has no UTF-8.
        """
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[np.uint16]]:
        """Return the ids of each text, as `encode` would."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: ArrayLike, *, separator: str = "") -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: Integers (n,) in [0, 256].
            separator: What an end of document shows as.

        Raises:
            TypeError: `ids` are not integers.
            ValueError: `ids` are not one row, or one is out of range.
        """
        ids = np.asarray(ids)
        if ids.ndim != 1:
            raise ValueError(f"`ids` must be one row of tokens, got shape {ids.shape}.")
        if ids.size == 0:
            return ""
        if not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"`ids` must be integers, got {ids.dtype}.")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ValueError(
                f"`ids` must be in [0, {self.vocab_size}), got {ids.min()} to {ids.max()}; a model "
                "of another vocabulary needs its own tokenizer."
            )
        # Document by document, so that no character is made of bytes from two.
        ends = np.flatnonzero(ids == self.end_of_document)
        pieces = [piece[piece != self.end_of_document] for piece in np.split(ids, ends)]
        texts = [piece.astype(np.uint8).tobytes().decode("utf-8", "replace") for piece in pieces]
        return separator.join(texts)
