"""One file of tensors in the safetensors format, written and read a tensor at a time.

    8 bytes: length of the header | header, JSON | the tensors' bytes, one after the other
    {"NAME": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}, ...}

Nothing in it can be executed. The format is written here, and not by the `safetensors` package,
because a save runs beside training: the package builds a second copy of all tensors, or refuses
tensors that share memory, and the copy holds Python's lock (1.3 s for 400 MB). Plain writes of the
tensors' own memory do neither. The package reads these files, which a test holds.

Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

_WORDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {word: dtype for dtype, word in _WORDS.items()}
_LONGEST_HEADER = 100_000_000  # as in the safetensors package


def dtype_word(dtype: torch.dtype) -> str:
    """Return the format's word for `dtype`.

    Raises:
        ValueError: It has none.
    """
    if dtype not in _WORDS:
        raise ValueError(f"a tensor to save must be of {', '.join(_WORDS.values())}, got {dtype}")
    return _WORDS[dtype]


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], values: Iterable[Any]
) -> list[int]:
    """Write a new file, durably; return the CRC-32 of each tensor.

    Args:
        path: The file; replaced when it exists.
        shapes: dtype and shape of each tensor by name, in the order of `values`.
        values: The tensors, each taken when the one before it is written; of any device.

    Raises:
        ValueError: A value is not of the dtype and shape stated.
        OSError: The disk is full, say.
    """
    header, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": dtype_word(dtype),
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of eight bytes
    checksums = []
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, (dtype, shape)), value in zip(shapes.items(), values, strict=True):
            if (value.dtype, tuple(value.shape)) != (dtype, shape):
                raise ValueError(
                    f"tensor {name} must be {dtype} of shape {shape}, got {value.dtype} of shape "
                    f"{tuple(value.shape)}"
                )
            data = _bytes(value.detach().contiguous().cpu())
            checksums.append(zlib.crc32(data))
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return checksums


class TensorFile:
    """An open file of tensors: its header is checked, and ranges of elements are read.

    Raises:
        ValueError: The header is not that of a safetensors file of this length.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("rb")
        try:
            self._data, self.header = _read_header(path, self._file)
        except BaseException:
            self._file.close()
            raise

    def read(
        self, name: str, start: int, length: int, *, checksum: int | None = None
    ) -> torch.Tensor:
        """Return `length` elements of tensor `name` from `start` on, flat, on the CPU.

        Args:
            name: Of a tensor in the file.
            start: First element, in row-major order.
            length: How many.
            checksum: CRC-32 of the whole tensor; compared when all of it is read.

        Raises:
            ValueError: There is no such range, or the bytes are not those that were written.
        """
        if name not in self.header:
            raise ValueError(f"{self._path}: no tensor {name}")
        dtype, numel, first = self.header[name]
        if start < 0 or length < 0 or start + length > numel:
            raise ValueError(
                f"{self._path}: {name} has elements [0, {numel}), got a request for "
                f"[{start}, {start + length})"
            )
        tensor = torch.empty(length, dtype=dtype)
        data = _bytes(tensor)
        self._file.seek(self._data + first + start * dtype.itemsize)
        if self._file.readinto(data) != len(data):
            raise ValueError(f"{self._path}: {name} is cut short")
        if checksum is not None and length == numel and zlib.crc32(data) != checksum:
            raise ValueError(
                f"{self._path}: {name} is not as it was written (its checksum differs)"
            )
        return tensor

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _read_header(path: Path, file: BinaryIO) -> tuple[int, dict[str, tuple[torch.dtype, int, int]]]:
    """Return where the tensors' bytes begin, and each tensor's dtype, elements and first byte."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(_LONGEST_HEADER, size - 8):
        raise ValueError(f"{path}: not a safetensors file")
    header = {}
    try:
        raw: dict[str, Any] = json.loads(file.read(length))
        for name, entry in raw.items():
            if name == "__metadata__":
                continue
            dtype, numel = DTYPES[entry["dtype"]], math.prod(entry["shape"])
            first, end = entry["data_offsets"]
            if not 0 <= first <= end <= size - 8 - length or end - first != numel * dtype.itemsize:
                raise ValueError(f"the bytes of {name} do not fit")
            header[name] = (dtype, numel, first)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: not a safetensors file: {reason}") from None
    return 8 + length, header


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
