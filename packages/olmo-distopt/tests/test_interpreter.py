"""The tests of the kernels in Triton's interpreter, in a process of their own.

Triton reads `TRITON_INTERPRET` when it is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from olmo_distopt import GradientReducer, ShardedAdamW, ShardedMuon
from torch import nn

FILES = ["test_kernels.py"]


@pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
def test_the_kernels_in_the_interpreter():
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *(str(folder / f) for f in FILES)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    print(done.stdout[-4000:])  # noqa: T201 # pytest shows it when the assertion fails
    assert done.returncode == 0
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_without_a_gpu_and_an_interpreter_the_kernels_are_refused(alone):
    """In a process that does not interpret, as this one: "triton" raises, "auto" does not."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton interprets in this process")
    named = [("w", nn.Parameter(torch.zeros(2, 2)))]
    with pytest.raises(ValueError, match=r"must be given CUDA tensors, got cpu; use `impl='ref"):
        GradientReducer(named, alone, impl="triton")
    for make in (ShardedAdamW, ShardedMuon):
        with pytest.raises(ValueError, match="must be given CUDA tensors, got cpu"):
            make(named, alone, lr=0.1, impl="triton")
        with pytest.raises(ValueError, match=r"`impl` must be one of .*'triton'.*, got 'cuda'"):
            make(named, alone, lr=0.1, impl="cuda")
    with pytest.raises(ValueError, match=r"adds to float32, got `accumulate_dtype` float64"):
        GradientReducer(named, alone, impl="triton", accumulate_dtype=torch.float64)


def test_without_triton_the_word_is_refused(alone, monkeypatch):
    monkeypatch.setattr("olmo_distopt._impl.find_spec", lambda name: None)
    named = [("w", nn.Parameter(torch.zeros(2, 2)))]
    with pytest.raises(RuntimeError, match=r"`impl='triton'` needs triton; install it or use"):
        GradientReducer(named, alone, impl="triton")
