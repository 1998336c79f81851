"""Real text that is there wherever Python is: the source of its standard library, as bytes.

Shapes: B sequences, S bytes a sequence.
"""

import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
# Every so many files one is held out, so that no held-out file was ever trained on.
_HELD_OUT_EVERY = 12


class Text:
    """Training and held-out bytes, as two uint8 tensors.

    Attributes:
        train: the bytes of eleven of twelve files, in the order of their names.
        held_out: the bytes of the others.
        digest: the first 12 hexadecimal digits of the SHA-256 of both, to tell libraries apart.
    """

    def __init__(self) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(
            path
            for path in root.rglob("*.py")
            if not _NOT_THE_LIBRARY & set(path.relative_to(root).parts)
        )
        contents = [path.read_bytes() for path in files]
        held_out = b"".join(contents[::_HELD_OUT_EVERY])
        train = b"".join(c for i, c in enumerate(contents) if i % _HELD_OUT_EVERY)
        self.digest = hashlib.sha256(train + held_out).hexdigest()[:12]
        self.train = torch.frombuffer(bytearray(train), dtype=torch.uint8)
        self.held_out = torch.frombuffer(bytearray(held_out), dtype=torch.uint8)

    def describe(self) -> str:
        """Return sizes and digest in words."""
        return (
            f"standard library, {self.train.numel()} bytes to train and "
            f"{self.held_out.numel()} held out, sha256 {self.digest}"
        )


def draw_batch(text: Tensor, sequences: int, length: int, generator: torch.Generator) -> Tensor:
    """Return `bytes_BS` of `length` + 1 bytes from random places, int64: inputs and targets."""
    starts_B = torch.randint(text.numel() - length, (sequences,), generator=generator)
    places_BS = starts_B[:, None] + torch.arange(length + 1)
    return text[places_BS].long()
