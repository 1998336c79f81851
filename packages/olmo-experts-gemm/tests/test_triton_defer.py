"""`defer` of the fused MLP: its weight gradients are computed after the backward, bit for bit.

Run on a GPU by bfloat16, and on a CPU by `test_interpreter.py`, as `test_triton_layer.py`.
"""

import gc

import pytest
import torch
from later import Postponed, marked
from layer_problem import (
    INTERPRETED,
    LOW,
    NEEDS_GPU_OR_INTERPRETER,
    D,
    E,
    H,
    K,
    T,
    at_offset_one,
    layer_of,
    make_routes,
    make_tensors,
    rows_of,
)
from olmo_experts_gemm import grouped_mm
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = NEEDS_GPU_OR_INTERPRETER
WEIGHTS = ("w_gate_up", "w_down", "b_gate_up", "b_down")


def _leaves(tensors, frozen=()):
    leaves = {
        name: nn.Parameter(t.clone()) if name in WEIGHTS else t.detach().clone()
        for name, t in tensors.items()
    }
    return {name: leaf.requires_grad_(name not in frozen) for name, leaf in leaves.items()}


def _function(oracle, device, kind, tensors, activation="swiglu", **options):
    if kind == "layer":
        return layer_of(make_routes().to(device), activation, **options)
    tensors["weights"] = tensors["weights"].flatten()[:T]
    counts = [0, 2, *[1] * (E - 2)] if INTERPRETED else [0, 40, *[30] * (E - 2)]
    return rows_of(oracle.ends(counts, device), activation, **options)


def _assert_same_gradients(got, want):
    for name, leaf in want.items():
        assert (got[name].grad is None) == (leaf.grad is None), name
        assert leaf.grad is None or torch.equal(got[name].grad, leaf.grad), name


@pytest.mark.parametrize("kind", ["layer", "rows"])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "relu_squared", "clamped_swiglu"])
def test_deferred_gradients_are_the_undeferred_bit_for_bit(oracle, device, kind, activation):
    tensors, dy = make_tensors(device, LOW, activation, bias=True)
    function = _function(oracle, device, kind, tensors, activation)
    whole = _leaves(tensors)
    y = function(*whole.values())
    y.backward(dy)
    for defer in (Postponed(), Postponed(waits=False)):
        leaves = _leaves(tensors)
        again = _function(oracle, device, kind, tensors, activation, defer=defer)
        got = again(*leaves.values())
        assert torch.equal(got, y)
        got.backward(dy)
        assert all((leaves[name].grad is None) == defer.waits for name in WEIGHTS)
        assert defer.asked == [tuple(leaves[name] for name in WEIGHTS)]
        assert defer.run() == defer.waits
        _assert_same_gradients(leaves, whole)


@pytest.mark.parametrize(
    "frozen", [("w_down",), ("w_gate_up", "b_gate_up"), ("x", "weights"), ("x", "w_gate_up")]
)
def test_frozen_weights(oracle, device, frozen):
    tensors, dy = make_tensors(device, LOW, bias=True)
    whole, leaves, defer = _leaves(tensors, frozen), _leaves(tensors, frozen), Postponed()
    _function(oracle, device, "layer", tensors)(*whole.values()).backward(dy)
    _function(oracle, device, "layer", tensors, defer=defer)(*leaves.values()).backward(dy)
    defer.run()
    _assert_same_gradients(leaves, whole)


def test_a_stack_that_is_no_parameter_is_computed_now(oracle, device):
    tensors, dy = make_tensors(device, LOW)
    whole, leaves, defer = _leaves(tensors), _leaves(tensors), Postponed()
    _function(oracle, device, "layer", tensors)(*whole.values()).backward(dy)
    x, weights, w_gate_up, w_down = leaves.values()
    function = _function(oracle, device, "layer", tensors, defer=defer)
    function(x, weights, w_gate_up.clone(), w_down).backward(dy)
    assert defer.asked == [(w_down,)]
    assert torch.equal(w_gate_up.grad, whole["w_gate_up"].grad)
    defer.run()
    _assert_same_gradients(leaves, whole)


@pytest.mark.parametrize("aligned", [True, False])
def test_buffers_are_added_to_later(oracle, device, aligned):
    tensors, dy = make_tensors(device, LOW)
    results = []
    for defer in (None, Postponed()):
        leaves = _leaves(tensors)
        pair = [torch.ones_like(leaves[n], dtype=torch.float32) for n in ("w_gate_up", "w_down")]
        if not aligned:
            pair = [at_offset_one(buffer) for buffer in pair]
        options = {"main_grads": tuple(pair), "defer": defer}
        function = _function(oracle, device, "layer", tensors, **options)
        for _ in range(2):
            function(*leaves.values()).backward(dy)
        if defer is not None:
            assert all((buffer == 1).all() for buffer in pair)
            assert [compute() for _, compute in defer.waiting] == [(None, None)] * 2
        assert leaves["w_down"].grad is None
        results.append([*pair, leaves["x"].grad, leaves["weights"].grad])
    assert all(map(torch.equal, *results))


def test_backward_looks_at_the_buffers_again(oracle, device):
    tensors, dy = make_tensors(device, LOW)
    leaves = _leaves(tensors)
    pair = tuple(torch.zeros_like(leaves[n], dtype=torch.float32) for n in ("w_gate_up", "w_down"))
    options = {"main_grads": pair, "defer": Postponed()}
    y = _function(oracle, device, "layer", tensors, **options)(*leaves.values())
    pair[1].resize_(1, 2, 3)
    with pytest.raises(ValueError, match=r"`main_grads\[1\]` must be .* shape \(1, 2, 3\)"):
        y.backward(dy)


class _Packer:
    def __init__(self):
        self.shapes = []

    def pack(self, tensor):
        self.shapes.append(tuple(tensor.shape))
        return tensor.double(), tensor.dtype

    def unpack(self, packed):
        return packed[0].to(packed[1])


def test_packed_activations(oracle, device):
    tensors, dy = make_tensors(device, LOW, bias=True)
    whole, leaves, defer, packer = _leaves(tensors), _leaves(tensors), Postponed(), _Packer()
    _function(oracle, device, "layer", tensors)(*whole.values()).backward(dy)
    options = {"defer": defer, "pack": packer}
    _function(oracle, device, "layer", tensors, **options)(*leaves.values()).backward(dy)
    assert packer.shapes == [(T, D), (T * K, 2 * H)]
    defer.run()
    _assert_same_gradients(leaves, whole)


@pytest.mark.parametrize("kind", ["layer", "rows"])
def test_no_tokens(device, kind):
    tensors, dy = make_tensors(device, LOW, bias=True, rows=0, weights=(0, K))
    leaves, defer = _leaves(tensors), Postponed()
    ids = make_routes()[:0].to(device)
    layer_of(ids, defer=defer)(*leaves.values()).backward(dy)
    defer.run()
    for name in WEIGHTS:
        assert leaves[name].grad.shape == leaves[name].shape
        assert (leaves[name].grad == 0).all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute(oracle, device, reentrant):
    tensors, dy = make_tensors(device, LOW)
    whole, leaves, defer = _leaves(tensors), _leaves(tensors), Postponed()
    _function(oracle, device, "layer", tensors)(*whole.values()).backward(dy)
    function = _function(oracle, device, "layer", tensors, defer=defer)
    x, *others = leaves.values()
    checkpoint(lambda x: function(x, *others), x, use_reentrant=reentrant).backward(dy)
    assert defer.run() == 1
    _assert_same_gradients(leaves, whole)


def test_what_waits_keeps_no_graph(oracle, device):
    tensors, dy = make_tensors(device, LOW, bias=True)
    leaves, defer = _leaves(tensors), Postponed()
    (x, node), (weights, other) = marked(leaves["x"]), marked(leaves["weights"])
    function = _function(oracle, device, "layer", tensors, defer=defer)
    y = function(*(leaves | {"x": x, "weights": weights}).values())
    y.backward(dy)
    assert node() is not None
    del x, weights, y
    gc.collect()
    assert node() is other() is None
    assert defer.run() == 1


def test_one_product(oracle, device):
    tensors, _ = make_tensors(device, LOW)
    offsets = oracle.ends([2] * E, device)
    results = []
    for defer in (None, Postponed()):
        leaves = _leaves(tensors)
        y = grouped_mm(leaves["x"], leaves["w_gate_up"], offsets, defer=defer, impl="triton")
        y.backward(torch.ones_like(y))
        if defer is not None:
            assert leaves["w_gate_up"].grad is None
            assert defer.run() == 1
        results.append((y, leaves["x"].grad, leaves["w_gate_up"].grad))
    assert all(map(torch.equal, *results))
