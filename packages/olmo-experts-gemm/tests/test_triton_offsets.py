"""Ends of experts that lie past the rows: the kernels stop at the last row, reading and writing.

On CUDA such ends fail an assertion on the device, after which a process cannot use it. Triton's
interpreter ignores the assertion, so what would be touched shows there, and there alone.
"""

import pytest
import torch
from layer_problem import INTERPRETED, LOW, NEEDS_GPU_OR_INTERPRETER, D, E, H, T, make_tensors
from olmo_experts_gemm import _fused_order, _triton_product
from torch.overrides import TorchFunctionMode

pytestmark = [
    *NEEDS_GPU_OR_INTERPRETER,
    pytest.mark.skipif(not INTERPRETED, reason="the assertion ends a process's use of the device"),
]
GUARD = 4096
MARK = 77


class _Guarded(TorchFunctionMode):
    """Lays every fresh tensor between marked guards, which nothing may write to."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        fresh = func(*args, **(kwargs or {}))
        if func not in (torch.empty, torch.Tensor.new_empty):
            return fresh
        whole = torch.full((fresh.numel() + 2 * GUARD,), MARK, dtype=fresh.dtype)
        inside = whole[GUARD : GUARD + fresh.numel()]
        if fresh.is_floating_point():
            inside.fill_(torch.nan)
        self.made.append(whole)
        return inside.view(fresh.shape)

    def untouched(self):
        guards = [guard for whole in self.made for guard in (whole[:GUARD], whole[-GUARD:])]
        return len(guards) > 0 and all((guard == MARK).all() for guard in guards)


def _inputs():
    tensors, dy = make_tensors("cpu", LOW, bias=True, weights=(T,))
    tensors["weights"] = tensors["weights"].float()
    # What lies behind the operands, where a kernel that goes too far would read.
    behind = {
        name: torch.cat([t.flatten(), t.new_full((GUARD,), torch.nan)])[: t.numel()].view_as(t)
        for name, t in {**tensors, "dy": dy}.items()
    }
    return behind, behind.pop("dy")


def _layer(ends, main_grads):
    """Every output and gradient, by the functions behind the operators."""
    tensors, dy = _inputs()
    x, weights, up, down, b_up, b_down = tensors.values()
    rows = _fused_order.Rows(
        torch.tensor(ends, dtype=torch.int32), weights, None, None, 1, "swiglu"
    )
    into = None
    if main_grads:
        into = tuple(w.new_empty(w.shape, dtype=torch.float32).zero_() for w in (up, down))
    y, hidden = _fused_order.forward(x, up, down, b_up, b_down, rows, True)
    needs = _fused_order.Needs(*[True] * 6)
    made = _fused_order.backward(dy, x, hidden, up, down, b_down, rows, needs, into)
    return [y, *made, *(into or ())]


def _product(ends, main_grads):
    tensors, dy = _inputs()
    offsets = torch.tensor(ends, dtype=torch.int32)
    x, down = tensors["x"], tensors["w_down"].mT.contiguous()
    y = _triton_product.grouped_mm(x, down, offsets)
    outer = _triton_product.grouped_outer(dy, x, offsets)
    into = outer.new_empty(outer.shape, dtype=torch.float32).zero_()
    if main_grads:
        _triton_product.add_grouped_outer(into, dy, x, offsets)
    return [y, outer, into]


@pytest.mark.parametrize("main_grads", [False, True], ids=["", "main_grads"])
@pytest.mark.parametrize("function", [_layer, _product])
@pytest.mark.parametrize("past", [1, 40, 2**30])
def test_ends_past_the_rows_count_as_the_last_row(function, past, main_grads):
    assert (E, D, H) == (4, 24, 40)
    with _Guarded() as guarded:
        got = function([5, 9, T + past - 1, T + past], main_grads)
    assert guarded.untouched()
    want = function([5, 9, T, T], main_grads)
    for value, exact in zip(got, want, strict=True):
        assert value.isfinite().all()
        assert torch.equal(value, exact)


@pytest.mark.parametrize("function", [_layer, _product])
@pytest.mark.parametrize("ends", [[T, 2, T, 1], [T + 3, 0, T + 9, T], [9, 3, 3, 2]], ids=str)
def test_ends_that_decrease_write_nothing_outside(function, ends):
    with _Guarded() as guarded:
        function(ends, main_grads=True)
    assert guarded.untouched()
