"""Any tokenizer that the `tokenizers` library can save: one JSON file.

The library is the extra `prepare` of this app, imported when a tokenizer is opened.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from olmo_trainer.extras import install_command

# What the tokenizers of the well-known open models call it.
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class JsonTokenizer:
    """A tokenizer out of a `tokenizer.json`, for text that holds anything.

    Text that spells a special token ("<|endoftext|>" in a page about tokenizers) is encoded as the
    ordinary characters it is, so no document can end another. No special tokens are added, and the
    file's padding and truncation are off.

    Args:
        path: The JSON file.
        end_of_document: The token after each document; when None, the one of the usual names
            that the vocabulary holds.

    Attributes:
        name: "tokenizers " and a hash of the file.
        vocab_size: One more than the greatest id, added tokens included.
        end_of_document: The id of the token after each document.

    Raises:
        ValueError: The extra is not installed, the file is no tokenizer, or the end of a document
            is not in its vocabulary or not clear.
    """

    def __init__(self, path: str | Path, end_of_document: str | None = None) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError(
                f"a tokenizer file needs the package `tokenizers`, to open {path}; install it with "
                f"{install_command('prepare')}"
            ) from None
        path = Path(path).expanduser()
        try:
            content = path.read_bytes()
            # The library raises a bare Exception.
            self._tokenizer = Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:
            raise ValueError(
                f"`{path}` must be a tokenizer as the `tokenizers` library saves it "
                f"(tokenizer.json), got {type(error).__name__}: {error}."
            ) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        self.name = f"tokenizers {hashlib.blake2b(content, digest_size=16).hexdigest()}"
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        self.end_of_document = _find_end(path, ids, end_of_document)

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Return the ids of a text, uint32 (n,), without an end of document."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the ids of each text, uint32 (n,), as `encode` would."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of ids, integers (n,), without special tokens and ends of documents.

        Raises:
            ValueError: An id is out of range.
        """
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise ValueError(
                f"`ids` must be in [0, {self.vocab_size}), got {ids.min()} to {ids.max()}; a model "
                "of another vocabulary needs its own tokenizer."
            )
        ids = ids[ids != self.end_of_document]
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)


def _find_end(path: Path, ids: dict[str, int], asked: str | None) -> int:
    if asked is not None:
        if asked not in ids:
            raise ValueError(
                f"the end of a document must be a token of `{path}`, got {asked!r}; give one of "
                "its special tokens."
            )
        return ids[asked]
    found = [token for token in _USUAL_ENDS if token in ids]
    if len(found) != 1:
        raise ValueError(
            f"`{path}` must hold one of {', '.join(_USUAL_ENDS)} to end a document, found "
            f"{' and '.join(found) or 'none'}; name the token to use."
        )
    return ids[found[0]]
