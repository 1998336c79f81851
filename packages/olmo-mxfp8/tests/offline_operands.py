"""Operands and a compiler for the launchers of kernels, where no GPU is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import compiled_kernels
import pytest
import torch
from compiled_kernels import SHARED_BYTES
from torch import Tensor

E, R, K, N = 4, 300, 512, 384
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OUT_DTYPES = pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)


@contextmanager
def compiling_for(capability: int) -> Iterator[list[Any]]:
    """As the shared one, with the tilings and the casts of this architecture."""
    from olmo_mxfp8._triton import quantize, tiling

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "generation", lambda device: capability // 10)
        patch.setattr(quantize, "casts", lambda device: capability >= 89)
        with compiled_kernels.compiling_for(capability) as compiled:
            yield compiled


def assert_fits(kernel: Any, capability: int) -> None:
    compiled_kernels.assert_fits(kernel, SHARED_BYTES[capability])


def packed(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype).view(dtype)


def offsets() -> Tensor:
    return torch.zeros(E, dtype=torch.int32)
