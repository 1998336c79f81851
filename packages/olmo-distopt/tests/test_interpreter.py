"""The tests of the kernels in Triton's interpreter, and what is said without it."""

import pytest
import torch
from olmo_distopt import GradientReducer, ShardedAdamW, ShardedMuon
from torch import nn
from triton_interpreter import INTERPRETED


def test_the_kernels_in_the_interpreter(interpreter):
    assert interpreter.skipped("test_kernels.py", "test_newton_schulz_kernels.py") == []


@pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")
def test_without_a_gpu_and_an_interpreter_the_kernels_are_refused(alone):
    """In a process that does not interpret, as this one: "triton" raises, "auto" does not."""
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
