"""The tests of the kernels in Triton's interpreter, in a process of their own.

Triton reads `TRITON_INTERPRET` when it is imported.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
def test_the_kernels_in_the_interpreter():
    file = Path(__file__).parent / "test_rowwise_kernels.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-rs", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    print(done.stdout[-4000:])  # noqa: T201 # pytest shows it when the assertion fails
    assert done.returncode == 0
    assert " passed" in done.stdout
    skipped = re.findall(r"SKIPPED \[\d+\].*", done.stdout)
    assert all("needs a GPU" in line for line in skipped)
    assert "7 passed" in done.stdout
