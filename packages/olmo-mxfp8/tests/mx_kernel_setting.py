"""Where the tests of the kernels run: on a GPU, or on a CPU in Triton's interpreter."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
KERNEL_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]
