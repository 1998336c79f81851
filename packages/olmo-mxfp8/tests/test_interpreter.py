"""The tests of the kernels in Triton's interpreter, in a process of their own.

Triton reads `TRITON_INTERPRET` when it is imported. bfloat16 is wrong in the interpreter, so there
these tests use float16 and float32.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ["test_kernels.py", "test_product_kernels.py", "test_swiglu_kernels.py"]


@pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
def test_the_kernels_in_the_interpreter():
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *(str(folder / f) for f in FILES)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    # What is skipped there needs a device: large tensors, and waiting for one.
    assert re.search(r"\d+ passed, 7 skipped", done.stdout), done.stdout[-400:]
