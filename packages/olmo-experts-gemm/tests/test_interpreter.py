"""The tests of the Triton kernels' public face in Triton's interpreter, in a process of their own.

Triton reads `TRITON_INTERPRET` when it is imported. bfloat16 is wrong in the interpreter, so there
these tests use float16 and float32 at small sizes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = [
    "test_triton_layer.py",
    "test_triton_layer_autograd.py",
    "test_triton_offsets.py",
    "test_triton_product.py",
]


@pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
def test_the_public_functions_in_the_interpreter():
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *(str(folder / f) for f in FILES)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    print(done.stdout[-4000:])  # noqa: T201 # pytest shows it when the assertion fails
    assert done.returncode == 0
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
