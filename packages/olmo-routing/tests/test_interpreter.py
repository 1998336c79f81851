"""The tests of the kernels in Triton's interpreter, and what is said without it."""

import pytest
import torch
from olmo_routing import plan_rows, route
from triton_interpreter import INTERPRETED


def test_the_kernels_in_the_interpreter(interpreter):
    assert interpreter.skipped("test_gate_kernels.py", "test_plan_kernels.py") == []


@pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")
def test_without_a_gpu_and_an_interpreter_the_kernels_are_refused():
    """In a process that does not interpret, as this one: "triton" raises, "auto" does not."""
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
