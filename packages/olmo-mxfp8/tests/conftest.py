"""An oracle of MXFP8 in float64 and plain Python, which shares no code with the package.

It reads the format off its definition: a table of all values, the nearest of them with ties to the
even code, and scales found by comparing powers of two.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

# importlib mode puts no folder on the path, and some tests share a module of this one.
sys.path.append(str(Path(__file__).parent))
torch.set_num_threads(1)

MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}
BIAS = {"e4m3": 7, "e5m2": 15}
MAX_EXPONENT = {"e4m3": 8, "e5m2": 15}
MAX_VALUE = {"e4m3": 448.0, "e5m2": 57344.0}
DTYPE = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Oracle:
    max_value = MAX_VALUE
    dtype = DTYPE

    def element(self, code: int, element: str) -> float:
        """Return the value of one element code."""
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = divmod(code & 0x7F, 2 ** MANTISSA_BITS[element])
        if element == "e4m3" and code & 0x7F == 0x7F:
            return math.nan
        if element == "e5m2" and exponent == 31:
            return math.nan if mantissa else sign * math.inf
        fraction = mantissa / 2 ** MANTISSA_BITS[element] + (exponent > 0)
        return sign * math.ldexp(fraction, max(exponent, 1) - BIAS[element])

    def scale(self, byte: int) -> float:
        return math.nan if byte == 255 else math.ldexp(1.0, byte - 127)

    def byte(self, amax: float, element: str, rule: str) -> int:
        """Return the scale byte of a block, by comparing powers of two."""
        if not math.isfinite(amax):
            return 255
        if rule == "floor":
            power = math.frexp(amax)[1] - 1 if amax else -1000  # of the largest 2^k <= amax
            return max(0, power - MAX_EXPONENT[element] + 127)
        byte = 0 if amax == 0 else max(0, math.frexp(amax)[1] - 20 + 127)
        while amax > math.ldexp(MAX_VALUE[element], byte - 127):
            byte += 1
        return byte

    def encode(self, x: np.ndarray, element: str) -> np.ndarray:
        """Return the code of the nearest value, the even code at a tie; finite `x` saturates."""
        table = np.array([self.element(code, element) for code in range(128)])
        table = table[np.isfinite(table)]
        lower = np.searchsorted(table, np.abs(x), side="right") - 1
        upper = np.minimum(lower + 1, len(table) - 1)
        middle = (table[lower] + table[upper]) / 2
        up = (np.abs(x) > middle) | ((np.abs(x) == middle) & (lower % 2 == 1))
        return (np.where(up, upper, lower) + 128 * np.signbit(x)).astype(np.uint8)

    def quantize(
        self, x: torch.Tensor, element: str = "e4m3", rule: str = "rceil", size: int = 32
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return codes and scale bytes along the last dimension, one byte for each 32."""
        blocks = x.detach().double().numpy().reshape(*x.shape[:-1], -1, size)
        amax = np.abs(blocks).max(-1)
        bytes_ = np.array([self.byte(float(a), element, rule) for a in amax.ravel()])
        bytes_ = bytes_.reshape(amax.shape).astype(np.int64)
        scaled = np.ldexp(blocks, 127 - bytes_[..., None])
        lost = (bytes_ == 255)[..., None]
        codes = np.where(lost, 0, self.encode(np.where(lost, 0, scaled), element))
        return codes.reshape(x.shape), np.repeat(bytes_, size // 32, -1)

    def round_trip(
        self, x: torch.Tensor, element: str = "e4m3", rule: str = "rceil", size: int = 32
    ) -> torch.Tensor:
        """Return finite `x` as MXFP8 holds it along the last dimension, in float64."""
        codes, bytes_ = self.quantize(x, element, rule, size)
        table = np.array([self.element(code, element) for code in range(256)])
        blocks = table[codes.astype(int)].reshape(*x.shape[:-1], -1, 32)
        return torch.from_numpy(np.ldexp(blocks, bytes_[..., None] - 127).reshape(x.shape))

    def quantize_tiles(
        self, x: torch.Tensor, element: str = "e4m3", rule: str = "rceil"
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return codes and one scale byte for each 128 x 128 of the last two dimensions."""
        codes, bytes_ = self.quantize(_tiles(x), element, rule, 128 * 128)
        back = codes.reshape(*bytes_.shape[:-1], 128, 128)
        back = np.moveaxis(back, -2, -3).reshape(x.shape)
        return back, bytes_[..., 0]

    def round_trip_tiles(
        self, x: torch.Tensor, element: str = "e4m3", rule: str = "rceil"
    ) -> torch.Tensor:
        """Return finite `x` as tiles of 128 x 128 with a shared scale hold it, in float64."""
        tiles = _tiles(x)
        back = self.round_trip(tiles, element, rule, 128 * 128)
        return back.unflatten(-1, (128, 128)).transpose(-2, -3).reshape(x.shape)


def _tiles(x: torch.Tensor) -> torch.Tensor:
    *_, rows, columns = x.shape
    split = x.unflatten(-1, (columns // 128, 128)).unflatten(-3, (rows // 128, 128))
    return split.transpose(-2, -3).flatten(-2)


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fill what torch leaves uninitialised with NaN, and start every test from one seed."""
    torch.manual_seed(0)
    # With this mode torch fills; on a GPU it also refuses cuBLAS without an environment variable.
    torch.use_deterministic_algorithms("gpu" not in request.keywords)
    yield
    torch.use_deterministic_algorithms(False)
