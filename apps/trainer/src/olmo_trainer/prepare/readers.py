"""A file to its texts, one after the other, without holding the file in memory.

Plain text is one text a file; JSON lines and Parquet are one a line or row, in a field of a given
name. What holds no text is yielded as "" and a reason, so that it is counted and never silent. A
file that is cut short or malformed is an error with its name and line.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from olmo_trainer.extras import install_command
from olmo_trainer.prepare.inputs import InputFile

_READ_BYTES = 2**20
_PARQUET_ROWS = 1024


def read_texts(file: InputFile, stream: BinaryIO, field: str) -> Iterator[tuple[str, str]]:
    """Yield each text and "", or "" and why there is none.

    Args:
        file: What `stream` is.
        stream: The file, opened; its position says how far the reading is.
        field: The name of the text in a line or row.

    Raises:
        ValueError: The file is malformed, has no such field, or needs an extra.
    """
    try:
        if file.layout == "parquet":
            yield from _parquet(file, stream, field)
            return
        plain = _unpacked(file, stream)
        if file.layout == "json lines":
            yield from _json_lines(file, plain, field)
        else:
            yield _decoded(plain.read())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"`{file.path}` must be a whole {file.packing} file, got {type(error).__name__}: "
            f"{error}; fetch it again."
        ) from None


def _decoded(content: bytes) -> tuple[str, str]:
    try:
        return content.decode("utf-8"), "empty"
    except UnicodeDecodeError:
        return "", "not UTF-8"


def _checked(text: object, place: str) -> tuple[str, str]:
    if text is None:
        return "", "no text"
    if not isinstance(text, str):
        raise ValueError(f"{place}: the text must be a string, got {type(text).__name__}.")
    # JSON can spell half a surrogate pair, which no UTF-8 holds.
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        return "", "not UTF-8"
    return text, "empty"


def _json_lines(
    file: InputFile, stream: io.BufferedIOBase, field: str
) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        place = f"`{file.path}`, line {number}"
        try:
            entry: Any = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{place}: each line must be a JSON object, got: {error}.") from None
        if not isinstance(entry, dict):
            raise ValueError(
                f"{place}: each line must be a JSON object, got {type(entry).__name__}."
            )
        if field not in entry:
            raise ValueError(
                f"{place}: each line must have the field {field!r}, got {', '.join(entry)}; name "
                "the text's with --field."
            )
        yield _checked(entry[field], place)


def _parquet(file: InputFile, stream: BinaryIO, field: str) -> Iterator[tuple[str, str]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise _missing("pyarrow", file) from None
    try:
        table = pyarrow.parquet.ParquetFile(stream)
        if field not in table.schema_arrow.names:
            raise ValueError(
                f"`{file.path}` must have the column {field!r}, got "
                f"{', '.join(table.schema_arrow.names)}; name the text's with --field."
            )
        row = 0
        for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=[field]):
            for text in batch.column(0).to_pylist():
                yield _checked(text, f"`{file.path}`, row {row}")
                row += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"`{file.path}` must be a whole Parquet file, got {type(error).__name__}: {error}."
        ) from None


def _unpacked(file: InputFile, stream: BinaryIO) -> io.BufferedIOBase:
    if file.packing == "gzip":
        # A GzipFile that reads is buffered; its type says less.
        return cast(io.BufferedIOBase, gzip.GzipFile(fileobj=stream, mode="rb"))
    if file.packing == "zstd":
        return io.BufferedReader(_ZstdFrames(file, stream), _READ_BYTES)
    return cast(io.BufferedIOBase, stream)


class _ZstdFrames(io.RawIOBase):
    """The content of one or more zstd frames; an end within a frame is an error, not an end."""

    def __init__(self, file: InputFile, stream: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError:
            raise _missing("zstandard", file) from None
        self._stream = stream
        self._error = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame = None
        self._pending = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            packed = self._pending or self._stream.read(_READ_BYTES)
            self._pending = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._error as error:
                raise EOFError(str(error)) from None
            if self._frame.eof:
                self._pending, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


def _missing(package: str, file: InputFile) -> ValueError:
    return ValueError(
        f"`{file.path}` needs the package `{package}`; install it with {install_command('prepare')}"
    )
