"""The tests of the kernels in Triton's interpreter, in a process of their own.

Triton reads `TRITON_INTERPRET` when it is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ["test_gate_kernels.py", "test_plan_kernels.py"]


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


def test_without_a_gpu_and_an_interpreter_the_kernels_are_refused():
    """In a process that does not interpret, as this one: "triton" raises, "auto" does not."""
    import torch
    from olmo_routing import plan_rows, route

    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton interprets in this process")
    logits = torch.zeros(2, 4)
    reason = "it runs on CUDA, not on cpu|triton is not installed"
    with pytest.raises(ValueError, match=rf"`impl='triton'` cannot run: ({reason}); use impl='ref"):
        route(logits, 2, impl="triton")
    with pytest.raises(ValueError, match=f"cannot run: ({reason})"):
        plan_rows(torch.zeros(2, 1, dtype=torch.int64), 4, impl="triton")
    with pytest.raises(ValueError, match=r"`impl` must be one of .*'triton'.*, got 'cuda'"):
        route(logits, 2, impl="cuda")
    with pytest.raises(ValueError, match="it runs on CUDA, not on meta"):
        route(logits.to("meta"), 2, impl="triton")
    assert route(logits, 2).expert_ids_TK.tolist() == [[0, 1]] * 2
