"""Which files are read, and as what: found by their names, in an order of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Literal

from olmo_trainer.text.sources import is_visible, walk_files

Layout = Literal["text", "json lines", "parquet"]
Packing = Literal["none", "gzip", "zstd"]

_PACKINGS: dict[str, Packing] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
DEFAULT_PATTERNS = (
    "*.txt",
    "*.parquet",
    *(f"*{json}{packing}" for json in _JSON_SUFFIXES for packing in ("", *_PACKINGS)),
)


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file to read.

    Attributes:
        path: Where it is.
        layout: A document a file, a document a line, or a document a row.
        packing: How its bytes are compressed.
        size: Of the file, in bytes.
    """

    path: Path
    layout: Layout
    packing: Packing
    size: int


def find_inputs(paths: Sequence[str | Path], patterns: Sequence[str] = ()) -> list[InputFile]:
    """Return the files of `paths`, in this order, those of a folder sorted by name.

    Args:
        paths: Files and folders; a folder is searched with its subfolders, hidden ones left out.
        patterns: Which files of a folder count, as shell patterns that respect case; by default
            text, JSON lines and Parquet by their usual suffixes.

    Raises:
        ValueError: A path leads nowhere or is given twice, or a folder has no such file.
    """
    wanted = tuple(patterns) or DEFAULT_PATTERNS
    found: list[InputFile] = []
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            files = sorted(name for name in _files_below(path, wanted) if (path / name).is_file())
            if not files:
                raise ValueError(
                    f"`{path}` must hold files named {' or '.join(wanted)}, found none; change "
                    "the path or --pattern."
                )
            found += [_describe(path / name) for name in files]
        elif path.is_file():
            found.append(_describe(path))
        else:
            raise ValueError(f"`{path}` must be a file or a folder of text, found nothing.")
    seen: set[Path] = set()
    for file in found:
        if file.path in seen:
            raise ValueError(f"each input must be given once, got `{file.path}` twice.")
        seen.add(file.path)
    return found


def _files_below(folder: Path, patterns: Sequence[str]) -> list[str]:
    def keep(file: PurePosixPath) -> bool:
        return is_visible(file) and any(fnmatchcase(file.name, each) for each in patterns)

    try:
        return list(walk_files(folder, is_visible, keep))
    except OSError as error:
        raise ValueError(f"`{folder}` must be readable, got {error}.") from error


def _describe(path: Path) -> InputFile:
    name = path.name.lower()
    packing: Packing = "none"
    for suffix, word in _PACKINGS.items():
        if name.endswith(suffix):
            name, packing = name.removesuffix(suffix), word
    layout: Layout = "text"
    if name.endswith(_JSON_SUFFIXES):
        layout = "json lines"
    elif name.endswith(".parquet") and packing == "none":
        layout = "parquet"
    return InputFile(path, layout, packing, path.stat().st_size)
