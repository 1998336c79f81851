"""`MXPacker.saved_tensors`: which operations share a copy, and which must not."""

import ctypes

import numpy as np
import pytest
import torch
from olmo_mxfp8 import MXPacker, dequantize, quantize
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

ROWS, WIDTH = 64, 128


def _held(function, packer=None):
    """Bytes that autograd holds, each memory once, and the result."""
    hooks, kept = (packer or MXPacker()).saved_tensors(min_numel=1), {}

    def note(tensor):
        saved = hooks.pack_hook(tensor)
        if hasattr(saved, "copy"):
            kept[id(saved.copy)] = saved.copy.packed.nbytes
        else:
            memory = saved.tensor.untyped_storage()
            kept[memory.data_ptr()] = memory.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, hooks.unpack_hook):
        y = function()
    return sum(kept.values()), y


def test_layers_that_save_one_activation_hold_one_copy():
    layers = [nn.Linear(WIDTH, WIDTH, bias=False).bfloat16() for _ in range(3)]
    x = torch.randn(2, ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weights = sum(layer.weight.nbytes for layer in layers)

    def shared():
        h = x.mul(2)
        return sum(layer(h) for layer in layers) + h.square() + h.view(-1, WIDTH).cos().view_as(h)

    def apart():
        return sum(layer(x.mul(2)) for layer in layers)

    for function, copies in ((shared, 1), (apart, 3)):
        held, y = _held(function)
        assert held == weights + copies * x.numel() * 33 // 32
        y.sum().backward()


VIEWS = {
    "itself": (lambda h: h, 32),
    "detached": (lambda h: h.view_as(h), 32),
    "heads": (lambda h: h.view(ROWS, 4, 32), 32),
    "heads first": (lambda h: h.view(ROWS, 2, 64).transpose(0, 1), 32),
    "turned": (lambda h: h.T, 32),
    "longer rows": (lambda h: h.view(32, 256), 128),
    "turned, and one more": (lambda h: h.T.unsqueeze(1), 32),
    "from inside out": (lambda h: h.view(32, 2, WIDTH).permute(2, 1, 0), 32),
}


@pytest.mark.parametrize(("view", "granularity"), VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("view_first", [False, True])
def test_views_of_a_whole_activation_share_its_copy(view, granularity, view_first):
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def run():
        h = x * 2
        parts = [lambda: h.square().sum(), lambda: view(h).pow(3).sum()]
        return sum(part() for part in (reversed(parts) if view_first else parts))

    packer = MXPacker(granularity=granularity)
    held, y = _held(run, packer)
    assert held == x.numel() * 33 // 32
    (dx,) = torch.autograd.grad(y, x)
    h = dequantize(quantize((x * 2).detach(), granularity=granularity))
    torch.testing.assert_close(dx, 2 * (2 * h + 3 * h * h))


APART = {
    "a part": (lambda h: h[: ROWS // 2], 0.5),
    "columns": (lambda h: h[:, :64], 0.5),
    "columns, turned": (lambda h: h[:, 32:96].T, 0.5),
    "another sign": (torch._neg_view, 1),
    "blocks across its rows": (lambda h: h.view(-1, 64, 4).mT.reshape(-1, 4, 64), 1),
    "other bits": (lambda h: torch.view_as_complex(h.view(ROWS, -1, 2)).conj().imag.float(), 0.5),
}


@pytest.mark.parametrize(("view", "share"), APART.values(), ids=APART)
def test_others_have_copies_of_their_own(view, share):
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def run():
        h = x * 2
        return h.square().sum() + view(h).pow(3).sum()

    held, y = _held(run)
    assert held == (1 + share) * x.numel() * 33 // 32
    (got,), (want,) = torch.autograd.grad(y, x), torch.autograd.grad(run(), x)
    assert (got - want).norm() < 0.1 * want.norm()


def test_a_conjugate_is_another_tensor():
    x, w = torch.randn(ROWS, WIDTH, 2, requires_grad=True), torch.ones(ROWS, WIDTH)
    w.requires_grad_()
    with MXPacker().saved_tensors(min_numel=1):
        z = torch.view_as_complex(x * 2)
        y = (z.imag * w).sum(), (z.conj().imag * w).sum()
    there, back = (torch.autograd.grad(each, w, retain_graph=True)[0] for each in y)
    assert torch.equal(there, -back)
    assert there.abs().sum() > 0


def test_the_activation_is_freed_and_nothing_keeps_itself_alive():
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True)
    with MXPacker().saved_tensors(min_numel=1, select=lambda t: t.shape[0] == ROWS):
        h = x * 2
        memory, y = StorageWeakRef(h.untyped_storage()), layer(h)
        del h
        assert memory.expired()
        e = y[:2].exp()  # saves its own result, as it is
    left = StorageWeakRef(e.untyped_storage())
    del e, y
    assert left.expired()
    hooks = MXPacker().saved_tensors(min_numel=1)
    h = x * 2
    saved = hooks.pack_hook(h)
    copy = StorageWeakRef(saved.copy.packed.values.data.untyped_storage())
    del saved
    assert copy.expired()
    with MXPacker().saved_tensors(min_numel=1):
        e = h.exp()  # saves its own result, rounded
    left = StorageWeakRef(
        e.grad_fn._raw_saved_result.data.copy.packed.values.data.untyped_storage()
    )
    del e
    assert left.expired()


def test_memory_that_changes_or_is_used_again_is_rounded_again():
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    one = torch.ones((), requires_grad=True)
    with MXPacker().saved_tensors(min_numel=1):
        buffer = one * torch.ones(ROWS, WIDTH)
        total = x * buffer
        buffer.mul_(2)
        total = total + x * buffer
        for value in (4.0, 8.0, 16.0):
            total = total + x * (one * torch.full((ROWS, WIDTH), value))
    (dx,) = torch.autograd.grad(total.sum(), x)
    assert torch.equal(dx, torch.full_like(x, 31.0))


class _Receive(torch.autograd.Function):
    """Gives a window of a buffer that something else has written, as a communication does."""

    @staticmethod
    def forward(ctx, x, buffer, write, value):
        write(buffer, value)
        return buffer.view_as(buffer)

    @staticmethod
    def backward(ctx, dy):
        return dy, None, None, None


class _Reduce(torch.autograd.Function):
    """Writes its input without a word to autograd and returns it, as some all-reduces do."""

    @staticmethod
    def forward(ctx, x):
        x.data.mul_(2)
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy


def _by_data(buffer, value):
    buffer.data.fill_(value)


def _by_numpy(buffer, value):
    buffer.detach().numpy()[:] = value


def _by_pointer(buffer, value):
    array = np.full(buffer.shape, value, dtype=np.float32)
    ctypes.memmove(buffer.data_ptr(), array.ctypes.data, array.nbytes)


WRITES = [_by_data, _by_numpy, _by_pointer]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("received", [False, True], ids=["input", "received"])
def test_a_buffer_that_is_written_unseen_is_read_as_it_is(write, received):
    """Steps one after another, and of each something is left that holds its graph."""
    buffer, source = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH, requires_grad=True)
    w, left = nn.Parameter(torch.ones(ROWS, WIDTH)), []
    context = MXPacker().saved_tensors(min_numel=1)
    for value in (1.0, 2.0, 4.0):
        with context:
            if received:
                h = _Receive.apply(source, buffer, write, value)
            else:
                write(buffer, value)
                h = buffer
            version = h._version
            left.append((h * w).mean())
            loss = (h.view(-1, WIDTH) * w).sum()
        assert version == 0
        (dw,) = torch.autograd.grad(loss, w)
        assert torch.equal(dw, torch.full_like(w, value))


def test_a_function_that_writes_unseen_and_returns_its_input_made_another_activation():
    x, w = torch.ones(ROWS, WIDTH, requires_grad=True), nn.Parameter(torch.ones(ROWS, WIDTH))
    with MXPacker().saved_tensors(min_numel=1):
        h = x * 2
        left = (h * w).mean()
        loss = (_Reduce.apply(h) * w).sum()
    (dw,) = torch.autograd.grad(loss, w)
    assert torch.equal(dw, torch.full_like(w, 4.0))
    assert left.requires_grad


def test_two_packers_hold_a_copy_each():
    x, w = torch.randn(ROWS, WIDTH), nn.Parameter(torch.ones(ROWS, WIDTH))
    h, elements = x.requires_grad_() * 2, ("e4m3", "e5m2")
    losses = []
    for element in elements:
        with MXPacker(element=element).saved_tensors(min_numel=1):
            losses.append((h * w).sum())
    for element, loss in zip(elements, losses, strict=True):
        (dw,) = torch.autograd.grad(loss, w, retain_graph=True)
        assert torch.equal(dw, dequantize(quantize(h, element=element)))


def test_anomalies_are_reported_as_without_it():
    x = torch.zeros(ROWS, WIDTH, requires_grad=True)
    with MXPacker().saved_tensors(min_numel=1):
        y = (x * 1).sqrt() * 0
    with (
        pytest.warns(UserWarning, match="Anomaly|No forward pass"),
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="SqrtBackward0' returned nan"),
    ):
        y.sum().backward()
