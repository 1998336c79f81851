"""`manifest.json`: what a folder of token files says of itself."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from olmo_trainer.text.tokens import Vocabulary

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"  # beside it, a copy of what made the ids; none for bytes
FORMAT = 1


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A token file of the folder.

    Attributes:
        name: In the folder.
        tokens: How many ids it holds, ends of documents included.
        documents: How many documents; each ends in this file.
        largest_id: The greatest id in it.
        hash: blake2b of its bytes, 32 hex digits.
    """

    name: str
    tokens: int
    documents: int
    largest_id: int
    hash: str


@dataclass(frozen=True, slots=True)
class TokenManifest:
    """A folder of token files.

    Attributes:
        vocabulary: Whose ids they are.
        dtype: "uint16" or "uint32", little-endian, without a header.
        files: In the order of their text.
        options: What they were made with: name -> value.
        inputs: What they were made of: path as given -> size in bytes.
        skipped: What was left out: reason -> how often.
    """

    vocabulary: Vocabulary
    dtype: str
    files: tuple[WrittenFile, ...]
    options: Mapping[str, Any]
    inputs: Mapping[str, int]
    skipped: Mapping[str, int]

    @property
    def tokens(self) -> int:
        """Ids in all files."""
        return sum(file.tokens for file in self.files)

    @property
    def documents(self) -> int:
        """Documents in all files."""
        return sum(file.documents for file in self.files)

    def write(self, path: Path) -> None:
        """Write it to the file `path`, whole or not at all."""
        raw = {"format": FORMAT, "tokens": self.tokens, "documents": self.documents} | asdict(self)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(raw, indent=1))
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> "TokenManifest":
        """Read the file `path`.

        Raises:
            ValueError: It cannot be read, or is of another format.
        """
        try:
            raw = json.loads(path.read_text())
            if raw["format"] != FORMAT:
                raise ValueError(f"format {raw['format']} is not the one this version reads")
            return cls(
                vocabulary=Vocabulary(**raw["vocabulary"]),
                dtype=raw["dtype"],
                files=tuple(WrittenFile(**file) for file in raw["files"]),
                options=raw["options"],
                inputs=raw["inputs"],
                skipped=raw["skipped"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"`{path}` must be a manifest of token files (format {FORMAT}), got "
                f"{type(error).__name__}: {error}; prepare the folder again."
            ) from None
