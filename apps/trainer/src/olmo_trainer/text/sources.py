"""Where the text comes from: files of a folder, read into documents.

A source reads a folder into a `Corpus`. One file is one document, its id is the path relative to
the folder with forward slashes, and documents come sorted by id, so that the order owes nothing to
the file system. Text is kept byte for byte: line ends are not translated.

A file is text when it is valid UTF-8. One that is not, an empty one, something that is no regular
file, and a link to a folder (it could lead in circles) are left out and listed in `Corpus.skipped`
with the reason. The whole text is held in memory; nothing is cached on disk.
"""

import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Protocol

# Tables and help topics that a script wrote: long, repetitive, and no text that a person typed.
_GENERATED_MODULES = frozenset({"encodings", "pydoc_data"})


@dataclass(frozen=True, slots=True)
class Document:
    """One text.

    Attributes:
        id: Names the document in its corpus; decides its split and its place.
        text: Its content, not empty.
    """

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """The documents of a source, sorted by id.

    Attributes:
        documents: At least one.
        skipped: What was left out: relative path -> the reason.
    """

    documents: tuple[Document, ...]
    skipped: Mapping[str, str]


class Source(Protocol):
    """Anything that can read a corpus."""

    def read(self) -> Corpus:
        """Read every document, the same each time."""
        ...


@dataclass(frozen=True, slots=True)
class StandardLibrary:
    """The Python standard library that came with this interpreter: real text on every machine.

    Its `.py` files, without tests, generated tables (`encodings`, `pydoc_data`), installed packages
    and whatever else shares the folder: about 10 MB. Another version of Python has another text.
    """

    def read(self) -> Corpus:
        """Read the library.

        Raises:
            ValueError: The interpreter came without the sources of its library.
        """
        folder = Path(sysconfig.get_paths()["stdlib"])
        advice = "this Python came without its sources: train on your own text with `TextFolder`"
        return _read_folder(folder, self._enter, self._keep, "`.py` files", advice)

    @staticmethod
    def _enter(folder: PurePosixPath) -> bool:
        is_test = folder.name in {"test", "tests"} or folder.name.endswith("_test")
        return _is_typed_library(folder) and not is_test

    @staticmethod
    def _keep(file: PurePosixPath) -> bool:
        return file.suffix == ".py" and _is_typed_library(file)


def _is_typed_library(path: PurePosixPath) -> bool:
    module = path.parts[0].removesuffix(".py")
    return module in sys.stdlib_module_names and module not in _GENERATED_MODULES


@dataclass(frozen=True, slots=True)
class TextFolder:
    """A folder of your own text files, searched with all its subfolders.

    Hidden files and folders (names that begin with a dot) do not belong to it.

    Attributes:
        path: The folder; `~` is your home.
        pattern: Which file names count, as shell patterns that respect case: one or several.

    Raises:
        ValueError: `pattern` is empty, or a pattern names a folder.
    """

    path: str | Path
    pattern: str | Sequence[str] = "*.txt"

    def __post_init__(self) -> None:
        if not self.patterns or not all(self.patterns):
            raise ValueError(
                f"`pattern` must be one or more file name patterns, got {self.pattern!r}; "
                "give one like '*.txt'."
            )
        for pattern in self.patterns:
            if "/" in pattern or "\\" in pattern:
                raise ValueError(
                    f"`pattern` must match file names, got {pattern!r} with a folder in it; every "
                    "subfolder is searched: give only the last part, like '*.txt'."
                )

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns, also when there is one."""
        return (self.pattern,) if isinstance(self.pattern, str) else tuple(self.pattern)

    def read(self) -> Corpus:
        """Read the folder.

        Raises:
            ValueError: The folder is missing, cannot be read, or holds no text that matches.
        """
        wanted = " or ".join(f"'{pattern}'" for pattern in self.patterns)
        advice = "put UTF-8 text files there, or change `path` or `pattern`"
        folder = Path(os.path.expanduser(self.path))
        return _read_folder(folder, is_visible, self._keep, f"files named {wanted}", advice)

    def _keep(self, file: PurePosixPath) -> bool:
        return is_visible(file) and any(fnmatchcase(file.name, p) for p in self.patterns)


def is_visible(path: PurePosixPath) -> bool:
    """Return whether a file or folder is not hidden."""
    return not path.name.startswith(".")


def _read_folder(
    folder: Path,
    enter: Callable[[PurePosixPath], bool],
    keep: Callable[[PurePosixPath], bool],
    wanted: str,
    advice: str,
) -> Corpus:
    """Read the kept files below `folder`; `enter` and `keep` are given relative paths."""
    documents: list[Document] = []
    skipped: dict[str, str] = {}
    try:
        if not folder.is_dir():
            found = "a file" if folder.exists() else "nothing"
            raise ValueError(f"`{folder}` must be a folder, found {found}; {advice}.")
        for path in sorted(walk_files(folder, enter, keep)):
            text, reason = _read_text(folder / path)
            if text:
                documents.append(Document(path, text))
            else:
                skipped[path] = reason
    except OSError as error:
        raise ValueError(
            f"`{folder}` must be readable, got {error}; change its permissions or leave it out."
        ) from error
    if not documents:
        reasons = [
            f"{count} {reason}" for reason, count in sorted(Counter(skipped.values()).items())
        ]
        left_out = f" (left out: {', '.join(reasons)})" if reasons else ""
        raise ValueError(f"`{folder}` must hold {wanted}, found none{left_out}; {advice}.")
    return Corpus(tuple(documents), skipped)


def walk_files(
    folder: Path,
    enter: Callable[[PurePosixPath], bool],
    keep: Callable[[PurePosixPath], bool],
) -> Iterator[str]:
    """Yield the relative paths of kept files, and of links to folders that would be entered.

    Raises:
        OSError: A folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    for parent, folders, files in os.walk(folder, onerror=fail):
        here = PurePosixPath(Path(parent).relative_to(folder).as_posix())
        folders[:] = [name for name in folders if enter(here / name)]
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        yield from (str(here / name) for name in links)
        yield from (str(here / name) for name in files if keep(here / name))


def _read_text(path: Path) -> tuple[str, str]:
    """Return the text of a file and "", or "" and why it has none."""
    if path.is_dir():
        return "", "a link to a folder"
    if not path.is_file():
        return "", "not a regular file"
    try:
        return path.read_bytes().decode("utf-8"), "empty"
    except UnicodeDecodeError:
        return "", "not UTF-8"
