"""What torch's kernel is handed and what is made of its output, with the strictest kernel there is.

Kernels differ by device and release: some do not launch on nothing, need aligned pointers, or leave
memory unwritten. This one does all of that, so the care taken for it is tested on any machine.
"""

import pytest
import torch
from olmo_experts_gemm import _torch_grouped_mm, grouped_mm, swiglu_experts

NAN = float("nan")
TORCH_KERNEL = _torch_grouped_mm._torch_grouped_mm


@pytest.fixture
def seen(monkeypatch) -> list[tuple[int, int]]:
    """Install the strict kernel; the addresses of its operands."""
    addresses = []

    def strict(a, b, *, offs):
        addresses.append((a.data_ptr(), b.data_ptr()))
        assert a.numel() > 0, "nothing to multiply"
        assert b.numel() > 0, "nothing to multiply"
        for operand in (a, b):
            assert operand.data_ptr() % 16 == 0, "a pointer is not aligned"
            *_, rows, columns = operand.shape
            assert operand.stride()[-2:] in ((columns, 1), (1, rows)), "an operand is not dense"
            assert max(operand.stride()) * operand.itemsize % 16 == 0, "a stride is not aligned"
        y = TORCH_KERNEL(a, b, offs=offs)
        if b.ndim == 3:
            y[int(offs[-1]) :] = NAN
        else:
            y[offs.diff(prepend=offs.new_zeros(1)) == 0] = NAN
        return y

    monkeypatch.setattr(_torch_grouped_mm, "_torch_grouped_mm", strict)
    return addresses


def _leaves(rows, experts, D=8, F=12):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, D, generator=generator)
    w = torch.randn(experts, F, D, generator=generator)
    return x, w, torch.randn(rows, F, generator=generator)


def _at_offset_one(tensor):
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view_as(tensor)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, w, dy: (x, w, dy),
        lambda x, w, dy: (_at_offset_one(x), w, dy),
        lambda x, w, dy: (x, _at_offset_one(w), dy),
        lambda x, w, dy: (x, w, _at_offset_one(dy)),
        lambda x, w, dy: (x.t().contiguous().t(), w, dy.t().contiguous().t()),
        lambda x, w, dy: (torch.cat([x, x], 1)[:, 8:], w.mT.contiguous().mT, dy[:1].expand_as(dy)),
        lambda x, w, dy: (x, torch.cat([w, w], 2)[:, :, 8:], dy),
    ],
    ids=["dense", "x at 1", "w at 1", "dy at 1", "x.t and dy.t", "halves", "w[:, :, 8:]"],
)
@pytest.mark.parametrize("counts", [[5, 0, 3, 0], [0, 8, 0, 0], [0, 0, 0, 7]])
def test_operands_are_laid_out_and_what_the_kernel_leaves_is_overwritten(
    oracle, run, seen, assert_same, change, counts
):
    x, w, dy = change(*_leaves(10, 4))
    offsets, rows = oracle.ends(counts), sum(counts)
    reference = run(
        lambda x, w: grouped_mm(x, w, offsets, impl="reference"), {"x": x, "w": w}, dy, x.dtype
    )
    leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
    y = grouped_mm(*leaves, offsets, impl="torch")
    dx, dw = torch.autograd.grad(y, leaves, dy)
    assert len(seen) == 3
    assert_same({"y": y, "x": dx, "w": dw}, reference, 1e-6)
    assert (y[rows:] == 0).all()
    assert (dx[rows:] == 0).all()
    assert all((dw[expert] == 0).all() for expert, count in enumerate(counts) if not count)


def test_packed_operands_are_not_copied_in_either_direction(oracle, seen):
    x, w, dy = _leaves(10, 2)
    leaves = [x.requires_grad_(), w.requires_grad_()]
    torch.autograd.backward(grouped_mm(*leaves, oracle.ends([4, 6]), impl="torch"), dy)
    x, w, dy = x.data_ptr(), w.data_ptr(), dy.data_ptr()
    assert seen == [(x, w), (dy, w), (dy, x)]


@pytest.mark.parametrize(("rows", "D", "F"), [(0, 8, 12), (3, 0, 12), (3, 8, 0)])
def test_the_kernel_is_not_launched_on_nothing(oracle, run, seen, rows, D, F):
    x, w, dy = _leaves(rows, 2, D, F)
    offsets = oracle.ends([0, rows])
    got = run(lambda x, w: grouped_mm(x, w, offsets, impl="torch"), {"x": x, "w": w}, dy, x.dtype)
    assert got["y"].shape == (rows, F)
    assert all((value == 0).all() for value in got.values())
    assert not seen


def test_both_products_of_an_mlp_run_on_it(oracle, seen):
    x, w_gate_up, _ = _leaves(10, 2, F=8)
    w_down = torch.ones(2, 8, 4)
    offsets = oracle.ends([4, 3])
    y = swiglu_experts(x, w_gate_up, w_down, offsets, impl="torch")
    assert len(seen) == 2
    assert (y[7:] == 0).all()
    want = swiglu_experts(x, w_gate_up, w_down, offsets, impl="reference")
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
