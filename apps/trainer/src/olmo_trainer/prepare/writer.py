"""Ids to files of bounded size, and the state from which a stopped preparation goes on.

A file is written under a temporary name and renamed when it is full and durable; after each, the
state says which files are whole and how far the inputs were read for them. A run that goes on
throws the unfinished file away and makes it again.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olmo_trainer.text import WrittenFile

STATE = "unfinished.json"
PARTIAL = "tokens.bin.partial"  # the file in hand


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """How far the inputs are read.

    Attributes:
        file: The number of the input file, from 0.
        text: How many of its texts are done, those left out too.
    """

    file: int = 0
    text: int = 0


@dataclass(slots=True)
class State:
    """What is done.

    Attributes:
        plan: What decides the bytes: options, inputs, vocabulary. Another plan cannot go on.
        files: The whole files.
        position: Up to where their text goes.
        skipped: What was left out up to there: reason -> how often.
    """

    plan: Mapping[str, Any]
    files: list[WrittenFile] = field(default_factory=list)
    position: Position = Position()
    skipped: dict[str, int] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write it into `folder`, whole or not at all."""
        partial = folder / f"{STATE}.partial"
        partial.write_text(json.dumps(asdict(self), indent=1))
        partial.replace(folder / STATE)

    @classmethod
    def read(cls, folder: Path, plan: Mapping[str, Any]) -> "State":
        """Return the state that `folder` is in; a new one for a folder without.

        Raises:
            ValueError: It cannot be read, was begun with another plan, or a file is not whole.
        """
        path = folder / STATE
        if not path.is_file():
            return cls(plan)
        try:
            raw = json.loads(path.read_text())
            state = cls(
                raw["plan"],
                [WrittenFile(**each) for each in raw["files"]],
                Position(**raw["position"]),
                raw["skipped"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"`{path}` must be the state of a preparation, got {type(error).__name__}: "
                f"{error}; give another folder, or delete this one."
            ) from None
        for key in plan.keys() | state.plan.keys():
            if plan.get(key) != state.plan.get(key):
                begun, given = _differing(state.plan.get(key), plan.get(key))
                raise ValueError(
                    f"`{folder}` was begun with {key} = {begun}, got {given}; go on with the same, "
                    "or give another folder."
                )
        return state


def _differing(begun: Any, given: Any, most: int = 3) -> tuple[Any, Any]:
    """Return two values, of long tables the first entries that differ: inputs may be thousands."""
    if not (isinstance(begun, dict) and isinstance(given, dict)):
        return begun, given
    names = [name for name in {**given, **begun} if begun.get(name) != given.get(name)]
    more = [f"{len(names) - most} more"] if len(names) > most else []
    shown = (
        [f"{name}: {table[name]}" if name in table else f"no {name}" for name in names[:most]]
        for table in (begun, given)
    )
    left, right = ("{" + ", ".join(words + more) + "}" for words in shown)
    return left, right


class TokenWriter:
    """Appends documents to numbered files; a context manager, which leaves no file open.

    Args:
        folder: Where.
        state: What is done; kept up to date.
        dtype: Of the ids.
        file_tokens: A file ends with the document that brings it to so many ids.
    """

    def __init__(
        self, folder: Path, state: State, dtype: np.dtype[np.unsignedinteger], file_tokens: int
    ) -> None:
        self._folder, self._state, self._file_tokens = folder, state, file_tokens
        self._stream = None
        self._skipped: Counter[str] = Counter(state.skipped)
        self._position = state.position
        for each in state.files:
            size = (folder / each.name).stat().st_size if (folder / each.name).is_file() else 0
            if size != each.tokens * dtype.itemsize:
                raise ValueError(
                    f"`{folder / each.name}` must have {each.tokens * dtype.itemsize} bytes, got "
                    f"{size}; give another folder, or delete this one."
                )

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def skip(self, reason: str, position: Position) -> None:
        """Count a text that was left out."""
        self._skipped[reason] += 1
        self._position = position

    def append(self, ids: NDArray[np.unsignedinteger], position: Position) -> bool:
        """Append a document, its end included; return whether that ended a file.

        Args:
            ids: In the dtype of the files.
            position: Up to where the inputs are read with it.
        """
        if self._stream is None:
            self._stream = self._partial.open("wb")
            self._tokens = self._documents = self._largest = 0
            self._hash = hashlib.blake2b(digest_size=16)
        content = ids.tobytes()
        self._stream.write(content)
        self._hash.update(content)
        self._tokens += len(ids)
        self._documents += 1
        self._largest = max(self._largest, int(ids.max()))
        self._position = position
        if self._tokens < self._file_tokens:
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """End the file in hand, if any, and bring the state up to date."""
        state = self._state
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._stream = None
            name = f"tokens-{len(state.files):05}.bin"
            self._partial.replace(self._folder / name)
            state.files.append(
                WrittenFile(
                    name, self._tokens, self._documents, self._largest, self._hash.hexdigest()
                )
            )
        state.position, state.skipped = self._position, dict(self._skipped)
        state.write(self._folder)

    @property
    def _partial(self) -> Path:
        return self._folder / PARTIAL
