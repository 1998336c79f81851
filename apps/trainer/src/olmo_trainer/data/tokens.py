"""Text as numbers: one token a byte, and one that ends a document.

    ids 0..255 = the bytes of the UTF-8 text, id 256 = end of document, so `vocab_size` = 257

Bytes need no training and no file, lose nothing, and make nats a token and nats a byte the same
number (but for the one end token a document).
"""

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Tokenizer(Protocol):
    """What the data needs of a tokenizer; `ByteTokenizer` is one.

    Attributes:
        name: Tells it from any tokenizer that gives other ids; enters the fingerprint of the data.
        vocab_size: Ids are in [0, vocab_size), at most 65536.
        end_of_document: The id after each document, also the id of padding.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def end_of_document(self) -> int: ...  # noqa: D102

    def encode(self, text: str) -> NDArray[np.uint16]:
        """Return the ids of a text, uint16 (n,), without an end of document."""
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
