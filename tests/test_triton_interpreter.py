"""The plugin that runs tests in Triton's interpreter."""

from pathlib import Path

import pytest
from triton_interpreter import Interpreter

KERNEL = """
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter


@triton.jit
def inner(x):
    return tl.where(x > 1, x, -x)


@triton.jit
def kernel(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, tl.sort(inner(inner(tl.load(x + at)))))


def test_a_launch_leaves_the_language_as_it_was():
    assert interpreter._patch_lang.__module__ == "triton_interpreter"
    before, x = (tl.sum, tl.reduce), torch.tensor([3, 0, 2, 5], dtype=torch.int32)
    for _ in range(2):
        kernel[(1,)](x, 4)
        assert x.tolist() == [0, 2, 3, 5]
        assert (tl.sum, tl.reduce) == before


@pytest.mark.skip("needs a GPU")
def test_what_cannot_run(): ...
"""
FAULT = """

def test_a_fault():
    x = torch.zeros(4, dtype=torch.int32)
    kernel[(1,)](x, 4)
    assert x.tolist() == [0, 0, 0, 7]
"""


def test_it_reports_skipped_tests_and_fails_with_those_that_fail(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    interpreter = Interpreter(pytestconfig, tmp_path, tmp_path / "report.xml")
    (tmp_path / "test_right.py").write_text(KERNEL)
    assert interpreter.skipped("test_right.py") == ["needs a GPU"]
    (tmp_path / "test_wrong.py").write_text(KERNEL + FAULT)
    with pytest.raises(pytest.fail.Exception, match=r"(?s)ended with 1.*test_a_fault.*1 failed"):
        interpreter.skipped("test_wrong.py")
