"""Boxes and short texts as a PNG file, with the standard library alone.

A PNG is a signature and chunks of (length, type, data, CRC): `IHDR` with the size, `IDAT` with the
zlib-compressed rows, `IEND`. Here each row is one filter byte (0, none) and 3 bytes a pixel (W3C
Recommendation "Portable Network Graphics (PNG) Specification", sections 5.3 and 11.2).
"""

import struct
import zlib
from collections.abc import Sequence

_DOT = 2  # pixels of one dot of a glyph
# Five rows of three dots for each glyph, top row first, as one octal digit a row.
_GLYPHS = {
    "0": 0o75557, "1": 0o26227, "2": 0o71747, "3": 0o71717, "4": 0o55711,
    "5": 0o74717, "6": 0o74757, "7": 0o71222, "8": 0o75757, "9": 0o75717,
    "A": 0o25755, "B": 0o65656, "C": 0o34443, "D": 0o65556, "E": 0o74647,
    "F": 0o74644, "G": 0o34553, "H": 0o55755, "I": 0o72227, "J": 0o11152,
    "K": 0o55655, "L": 0o44447, "M": 0o57755, "N": 0o65555, "O": 0o25552,
    "P": 0o65644, "Q": 0o25573, "R": 0o65655, "S": 0o34216, "T": 0o72222,
    "U": 0o55557, "V": 0o55552, "W": 0o55775, "X": 0o55255, "Y": 0o55222,
    "Z": 0o71247, ".": 0o00002, ",": 0o00024, ":": 0o02020, "%": 0o51245,
    "-": 0o00700, "_": 0o00007, "+": 0o02720, "/": 0o11244,
}  # fmt: skip


def write_png(
    width: int,
    height: int,
    boxes: Sequence[tuple[float, float, float, float, tuple[int, int, int], str]],
    labels: Sequence[tuple[float, float, str]],
) -> bytes:
    """Return the file.

    Args:
        width: Pixels.
        height: Pixels.
        boxes: Left, top, right, bottom, colour and text in the middle. A line of the right and of
            the lower edge stays white. Text that does not fit is left out.
        labels: Left, vertical middle and text; capitals, and what has no glyph stays blank.
    """
    rows = [bytearray(b"\xff" * (3 * width)) for _ in range(height)]
    for left, top, right, bottom, colour, text in boxes:
        _fill(rows, round(left), round(top), round(right) - 1, round(bottom) - 1, colour)
        length = _length(text)
        if length < right - left:
            _write(rows, round((left + right - length) / 2), round((top + bottom) / 2), text)
    for left, middle, text in labels:
        _write(rows, round(left), round(middle), text)
    data = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _length(text: str) -> int:
    return _DOT * (4 * len(text) - 1)


def _fill(
    rows: list[bytearray],
    left: int,
    top: int,
    right: int,
    bottom: int,
    colour: tuple[int, int, int],
) -> None:
    width = len(rows[0]) // 3
    left, right = max(0, left), min(width, right)
    if left < right:
        for row in rows[max(0, top) : max(0, bottom)]:
            row[3 * left : 3 * right] = bytes(colour) * (right - left)


def _write(rows: list[bytearray], left: int, middle: int, text: str) -> None:
    top = middle - 5 * _DOT // 2
    for position, letter in enumerate(text.upper()):
        glyph = _GLYPHS.get(letter, 0)
        for dot in range(15):
            if glyph >> (14 - dot) & 1:
                x = left + _DOT * (4 * position + dot % 3)
                y = top + _DOT * (dot // 3)
                _fill(rows, x, y, x + _DOT, y + _DOT, (0, 0, 0))
