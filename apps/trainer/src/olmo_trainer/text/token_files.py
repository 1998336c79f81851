"""Token files: ids on disk, memory-mapped and checked before anything trains on them.

A file is a flat row of uint16 or uint32 ids, little-endian: without a header, as OLMo-core keeps
them under the name `.npy` (its `NumpyFSLDataset` maps the bytes as they are), or with NumPy's own
`.npy` header. Documents follow one another, each with the vocabulary's end of document after it.

A folder that `prepare` wrote has a manifest, which says dtype, vocabulary, sizes and hashes. Other
files are scanned once when opened: every id is compared with the vocabulary and the bytes are
hashed. `check="sampled"` scans evenly spaced blocks of each file instead, for files of terabytes.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from olmo_trainer.text.manifest import MANIFEST, TokenManifest
from olmo_trainer.text.tokens import Vocabulary, shared_vocabulary

_SUFFIXES = (".npy", ".bin")
_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_BLOCK = 2**20  # ids looked at together
_SAMPLED_BLOCKS = 16


@dataclass(frozen=True, slots=True, eq=False)
class MappedFile:
    """A token file, mapped.

    Attributes:
        path: Where it is.
        tokens: Its ids, uint16 or uint32 (n,), read-only; pages are read when they are used.
        digest: Hex digits that change with its content.
    """

    path: Path
    tokens: NDArray[np.unsignedinteger]
    digest: str


@dataclass(frozen=True, slots=True)
class TokenCorpus:
    """The token files of a source, in order.

    Attributes:
        files: At least one.
        vocabulary: Whose ids they hold.
        num_documents: `None` when nothing says it.
    """

    files: tuple[MappedFile, ...]
    vocabulary: Vocabulary
    num_documents: int | None


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """Token files to train on.

    Attributes:
        paths: Files, folders or shell patterns (`~` is your home), read in this order; those of
            a folder or a pattern are sorted by name. A folder without a manifest gives its `.npy`
            and `.bin` files.
        vocab_size: Ids must be below it; a manifest must not name a larger one.
        dtype: "uint16" or "uint32", of files without a header or a manifest.
        end_of_document: The id after each document, of files without a manifest.
        check: Whether files without a manifest are scanned in full or in 16 blocks of 2**20 ids.

    Raises:
        ValueError: No path is given.
    """

    paths: Sequence[str | Path]
    vocab_size: int
    dtype: Literal["uint16", "uint32"] | None = None
    end_of_document: int | None = None
    check: Literal["all", "sampled"] = "all"

    def __post_init__(self) -> None:
        if not self.paths:
            raise ValueError("`paths` must name at least one token file or folder, got none.")

    def open(self) -> TokenCorpus:
        """Map and check every file.

        Raises:
            ValueError: A path leads nowhere, a size or dtype is wrong, an id is past the
                vocabulary, or vocabularies differ.
        """
        files: list[MappedFile] = []
        vocabularies: list[tuple[str, Vocabulary]] = []
        num_documents: int | None = 0
        for path in self._found():
            manifest = path / MANIFEST
            if manifest.is_file():
                described = TokenManifest.read(manifest)
                files += self._open_described(path, described)
                vocabularies.append((f"`{path}`", self._described_vocabulary(path, described)))
                if num_documents is not None:
                    num_documents += described.documents
                continue
            num_documents = None
            vocabulary = self._own_vocabulary(path)
            vocabularies.append((f"`{path}`", vocabulary))
            for file in _files_of(path):
                tokens = self._map(file)
                digest = _scan(file, tokens, vocabulary, self.check)
                files.append(MappedFile(file, tokens, digest))
        return TokenCorpus(tuple(files), shared_vocabulary(vocabularies), num_documents)

    def _found(self) -> list[Path]:
        paths: list[Path] = []
        for given in self.paths:
            path = Path(given).expanduser()
            if not path.exists() and has_magic(str(path)):
                matches = sorted(glob(str(path), recursive=True))
                if not matches:
                    raise ValueError(f"the pattern `{given}` must match token files, found none.")
                paths += map(Path, matches)
            elif path.exists():
                paths.append(path)
            else:
                raise ValueError(
                    f"`{path}` must be a token file or a folder of them, found nothing."
                )
        return paths

    def _described_vocabulary(self, folder: Path, manifest: TokenManifest) -> Vocabulary:
        vocabulary = manifest.vocabulary
        if vocabulary.size > self.vocab_size:
            raise ValueError(
                f"`{folder}` was made with a vocabulary of {vocabulary.size} ids, which must be at "
                f"most the model's ({self.vocab_size}); set model.vocab_size={vocabulary.size}."
            )
        for what, given, written in (
            ("dtype", self.dtype, manifest.dtype),
            ("end_of_document", self.end_of_document, vocabulary.end_of_document),
        ):
            if given is not None and given != written:
                raise ValueError(
                    f"`{what}` must be what the manifest of `{folder}` says ({written}), got "
                    f"{given}; leave it out."
                )
        return vocabulary

    def _open_described(self, folder: Path, manifest: TokenManifest) -> Iterator[MappedFile]:
        for file in manifest.files:
            path = folder / file.name
            if manifest.dtype not in _DTYPES:
                raise ValueError(f"`{folder}` must hold uint16 or uint32, got {manifest.dtype!r}.")
            size = path.stat().st_size if path.is_file() else 0
            expected = file.tokens * _DTYPES[manifest.dtype].itemsize
            if size != expected:
                raise ValueError(
                    f"`{path}` must have {expected} bytes, as the manifest says, got {size}; copy "
                    "it again, or prepare the folder again."
                )
            if file.largest_id >= manifest.vocabulary.size:
                raise ValueError(
                    f"`{path}`: ids must be in [0, {manifest.vocabulary.size}), the vocabulary, "
                    f"got {file.largest_id}; prepare the folder again."
                )
            yield MappedFile(path, _map_raw(path, manifest.dtype), file.hash)

    def _own_vocabulary(self, path: Path) -> Vocabulary:
        if self.end_of_document is None:
            raise ValueError(
                f"`{path}` has no manifest: `end_of_document` must be given, the id that ends each "
                "document (100257 for dolma2)."
            )
        return Vocabulary("", self.vocab_size, self.end_of_document)

    def _map(self, path: Path) -> NDArray[np.unsignedinteger]:
        with path.open("rb") as stream:
            has_header = stream.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX
        if has_header:
            return _map_npy(path, self.dtype)
        if self.dtype is None:
            raise ValueError(
                f"`{path}` has neither header nor manifest: `dtype` must be given, 'uint16' or "
                "'uint32'."
            )
        return _map_raw(path, self.dtype)


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(each for each in path.iterdir() if each.suffix in _SUFFIXES)
    if not files:
        raise ValueError(
            f"`{path}` must hold {' or '.join(_SUFFIXES)} files or a {MANIFEST}, found none."
        )
    return files


def _map_raw(path: Path, dtype: str) -> NDArray[np.unsignedinteger]:
    size, width = path.stat().st_size, _DTYPES[dtype].itemsize
    if size == 0 or size % width:
        raise ValueError(
            f"`{path}` must hold whole {dtype} ids, {width} bytes each, got {size} bytes; it is "
            "cut short, or of another dtype."
        )
    return np.asarray(np.memmap(path, dtype=_DTYPES[dtype], mode="r"))


def _map_npy(path: Path, dtype: str | None) -> NDArray[np.unsignedinteger]:
    try:
        tokens = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(
            f"`{path}` must be a whole `.npy` file, got {type(error).__name__}: {error}."
        ) from None
    if tokens.dtype not in _DTYPES.values() or tokens.ndim != 1 or not len(tokens):
        raise ValueError(
            f"`{path}` must hold one row of uint16 or uint32, got {tokens.dtype} of shape "
            f"{tokens.shape}."
        )
    if dtype is not None and tokens.dtype != _DTYPES[dtype]:
        raise ValueError(
            f"`dtype` must be what the header of `{path}` says ({tokens.dtype}), got {dtype}; "
            "leave it out."
        )
    return tokens


def _scan(
    path: Path, tokens: NDArray[np.unsignedinteger], vocabulary: Vocabulary, check: str
) -> str:
    """Compare ids with the vocabulary; return a digest of what was looked at, and of the size."""
    starts = range(0, len(tokens), _BLOCK)
    if check == "sampled":
        picked = np.linspace(0, len(starts) - 1, min(_SAMPLED_BLOCKS, len(starts)))
        starts = [starts[index] for index in picked.round().astype(int).tolist()]
    digest = hashlib.blake2b(f"{tokens.dtype} {len(tokens)}".encode(), digest_size=16)
    ends = False
    for start in starts:
        block = tokens[start : start + _BLOCK]
        largest = int(block.max())
        if largest >= vocabulary.size:
            position = start + int(block.argmax())
            raise ValueError(
                f"`{path}`: ids must be in [0, {vocabulary.size}), the model's vocabulary, got "
                f"{largest} at position {position}; the dtype or the tokenizer is another, or set "
                "model.vocab_size."
            )
        ends = ends or bool((block == vocabulary.end_of_document).any())
        digest.update(block.data)
    if not ends:
        raise ValueError(
            f"`{path}` must hold an end of document (id {vocabulary.end_of_document}), found none "
            f"in {len(tokens)} ids; `dtype` or `end_of_document` is another."
        )
    return digest.hexdigest()
