"""`defer`: weight gradients that are computed after the backward, in plain torch."""

import copy
import gc
import io
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from later import Postponed, marked
from olmo_experts_gemm import Experts, grouped_mm, moe_mlp, swiglu_experts
from torch import nn
from torch.utils.checkpoint import checkpoint

IMPLS = ["reference", "torch"]
STACKS = ("w_gate_up", "w_down")


def _problem(counts=(1, 0, 2, 2), spare=1, activation="swiglu", seed=0):
    """Rows, row weights, both stacks, both biases as parameters; the offsets; a gradient."""
    draw = torch.Generator().manual_seed(seed)
    rows, experts = sum(counts) + spare, len(counts)
    width = 4 if activation == "relu_squared" else 8
    shapes = ((rows, 8), (rows,), (experts, width, 8), (experts, 8, 4), (experts, width))
    values = [torch.randn(shape, generator=draw) for shape in (*shapes, (experts, 8))]
    names = ("x", "row_weights", *STACKS, "b_gate_up", "b_down")
    offsets = torch.tensor(counts).cumsum(0).int()
    return dict(zip(names, values, strict=True)), offsets, torch.randn(rows, 8, generator=draw)


def _leaves(tensors, frozen=()):
    make = {name: nn.Parameter if name[:2] in ("w_", "b_") else torch.clone for name in tensors}
    leaves = {name: make[name](tensor.clone()) for name, tensor in tensors.items()}
    return {name: leaf.requires_grad_(name not in frozen) for name, leaf in leaves.items()}


def _call(leaves, offsets, function="rows", **options):
    biases = {"b_gate_up_E2H": leaves["b_gate_up"], "b_down_ED": leaves["b_down"]}
    stacks = [leaves[name] for name in STACKS]
    if function == "rows":
        return swiglu_experts(
            *(leaves["x"], *stacks, offsets),
            row_weights_R=leaves["row_weights"],
            **biases,
            **options,
        )
    T = len(leaves["x"])
    ids = torch.arange(2 * T).view(T, 2) % len(offsets)
    ids[::3, 1] = -1
    weights = torch.stack([leaves["row_weights"]] * 2, dim=1)
    return moe_mlp(leaves["x"], ids, weights, *stacks, **biases, **options)


def _gradients(leaves):
    return {name: leaf.grad for name, leaf in leaves.items()}


def _assert_bits(got, want):
    for name, value in want.items():
        assert (got[name] is None) == (value is None), name
        assert value is None or torch.equal(got[name], value), name


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(0, 5), min_size=2, max_size=4),
    spare=st.integers(0, 2),
    impl=st.sampled_from(IMPLS),
    activation=st.sampled_from(["swiglu", "geglu", "relu_squared", "clamped_swiglu"]),
    function=st.sampled_from(["rows", "moe"]),
    frozen=st.sets(st.sampled_from(["x", "row_weights", *STACKS])),
)
def test_gradients_have_the_bits_of_one_backward(counts, spare, impl, activation, function, frozen):
    tensors, offsets, dy = _problem(tuple(counts), spare, activation)
    options = {"impl": impl, "activation": activation, "function": function}
    whole = _leaves(tensors, frozen)
    _call(whole, offsets, **options).backward(dy)
    leaves, defer = _leaves(tensors, frozen), Postponed()
    y = _call(leaves, offsets, defer=defer, **options)
    y.backward(dy)
    assert all(leaves[name].grad is None for name in STACKS)
    assert [len(w) for w, _ in defer.waiting] == [1] * (2 - len(frozen & set(STACKS)))
    defer.run()
    _assert_bits(_gradients(leaves), _gradients(whole))


@pytest.mark.parametrize("impl", IMPLS)
def test_one_product(impl):
    tensors, offsets, dy = _problem()
    dy = dy @ torch.ones(8, 8)
    results = []
    for defer in (None, Postponed(waits=False), Postponed()):
        leaves = _leaves(tensors)
        y = grouped_mm(leaves["x"], leaves["w_gate_up"], offsets, defer=defer, impl=impl)
        y.backward(dy)
        if defer is not None:
            assert defer.asked == [(leaves["w_gate_up"],)]
            assert defer.run() == defer.waits
        results.append((y, leaves["x"].grad, leaves["w_gate_up"].grad))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("impl", IMPLS)
def test_main_grads_are_added_to_later(impl):
    tensors, offsets, dy = _problem()
    results = []
    for defer in (None, Postponed()):
        leaves = _leaves(tensors)
        pair = tuple(torch.ones_like(leaves[name]) for name in STACKS)
        for _ in range(2):
            y = _call(leaves, offsets, impl=impl, main_grads=pair, defer=defer)
            y.backward(dy)
        if defer is not None:
            assert all((buffer == 1).all() for buffer in pair)
            assert [compute() for _, compute in defer.waiting] == [(None,)] * 4
        results.append({**dict(zip("ud", pair, strict=True)), **_gradients(leaves)})
    _assert_bits(results[1], results[0])
    assert results[0]["w_down"] is None


def test_a_packer_takes_the_same_tensors():
    tensors, offsets, dy = _problem()
    results = []
    for defer in (None, Postponed()):
        seen, leaves = [], _leaves(tensors)
        packer = SimpleNamespace(
            pack=lambda t, seen=seen: seen.append(t.shape) or t.double(), unpack=torch.Tensor.float
        )
        _call(leaves, offsets, impl="reference", pack=packer, defer=defer).backward(dy)
        if defer is not None:
            defer.run()
        results.append((seen, _gradients(leaves)))
    assert results[0][0] == results[1][0]
    _assert_bits(results[1][1], results[0][1])


@pytest.mark.parametrize("impl", IMPLS)
def test_only_parameters_wait(impl):
    """A stack that something has made has a backward of its own, which wants its gradient now."""
    tensors, offsets, dy = _problem()
    whole = _leaves(tensors)
    _call(whole, offsets, impl=impl).backward(dy)
    leaves, defer = _leaves(tensors), Postponed()
    made = {**leaves, "w_down": leaves["w_down"].clone()}
    _call(made, offsets, impl=impl, defer=defer).backward(dy)
    assert [weights for weights, _ in defer.waiting] == [(leaves["w_gate_up"],)]
    assert torch.equal(leaves["w_down"].grad, whole["w_down"].grad)
    defer.run()
    _assert_bits(_gradients(leaves), _gradients(whole))
    plain = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    defer = Postponed()
    _call(plain, offsets, impl=impl, defer=defer).backward(dy)
    assert not defer.asked


def test_hooks_see_one_gradient_and_no_other_call():
    tensors, offsets, dy = _problem()
    leaves, defer, seen = _leaves(tensors), Postponed(), []
    leaves["w_down"].register_hook(seen.append)
    leaves["w_down"].register_post_accumulate_grad_hook(seen.append)
    _call(leaves, offsets, defer=defer).backward(dy)
    assert seen == []


@pytest.mark.parametrize("recompute", [True, False])
def test_recompute(recompute):
    tensors, offsets, dy = _problem()
    whole = _leaves(tensors)
    _call(whole, offsets).backward(dy)
    leaves, defer = _leaves(tensors), Postponed()

    def run(x):
        return _call({**leaves, "x": x}, offsets, defer=defer)

    checkpoint(run, leaves["x"], use_reentrant=recompute).backward(dy)
    assert defer.run() == 2
    _assert_bits(_gradients(leaves), _gradients(whole))


@pytest.mark.parametrize("impl", IMPLS)
def test_what_waits_keeps_no_graph_and_is_computed_once(impl):
    tensors, offsets, dy = _problem()
    leaves, defer = _leaves(tensors), Postponed()
    x, node = marked(leaves["x"])
    row_weights, other = marked(leaves["row_weights"])
    y = _call({**leaves, "x": x, "row_weights": row_weights}, offsets, impl=impl, defer=defer)
    y.backward(dy)
    assert node() is not None
    del x, row_weights, y
    gc.collect()
    assert node() is other() is None
    _, compute = defer.waiting[0]
    compute()
    with pytest.raises(RuntimeError, match="must be computed once, got twice"):
        compute()


def test_it_is_not_asked_without_gradients_and_cannot_be_differentiated_twice():
    tensors, offsets, dy = _problem()
    leaves, defer = _leaves(tensors), Postponed()
    with torch.no_grad():
        _call(leaves, offsets, defer=defer)
    assert not defer.asked
    y = _call(leaves, offsets, defer=defer)
    (dx,) = torch.autograd.grad(y, leaves["x"], dy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_the_module_asks_and_copies_do_not():
    tensors, offsets, _ = _problem()
    experts = Experts(4, 8, 4, bias=True)
    assert experts.defer is None
    experts.defer = defer = Postponed()
    x = tensors["x"]
    experts(x, offsets).sum().backward()
    experts.moe(x, torch.zeros(len(x), 1).long(), torch.ones(len(x), 1)).sum().backward()
    up, down = experts.w_gate_up_E2HD, experts.w_down_EDH
    assert [w[0] is up for w in defer.asked] == [True, False, True, False]
    assert up.grad is None
    defer.run()
    assert up.grad is not None
    assert down.grad is not None
    assert copy.deepcopy(experts).defer is None
    file = io.BytesIO()
    torch.save(experts, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.defer is None
    assert torch.equal(loaded(x, offsets), experts(x, offsets))


def _calls(**options):
    tensors, offsets, _ = _problem()
    leaves = _leaves(tensors)
    return [
        lambda: _call(leaves, offsets, **options),
        lambda: _call(leaves, offsets, "moe", **options),
    ]


def test_what_is_no_function_is_refused():
    tensors, offsets, _ = _problem()
    leaves = _leaves(tensors)

    def product():
        return grouped_mm(leaves["x"], leaves["w_gate_up"], offsets, defer=True)

    for call in (*_calls(defer=True), product):
        with pytest.raises(TypeError, match="`defer` must be a function or None, got True"):
            call()
    for call in _calls(defer=lambda weights: True):
        with pytest.raises(TypeError, match=r"`defer` must return None or a function .* got True"):
            call()
    for call in _calls(defer=Postponed(), matmul=grouped_mm):
        with pytest.raises(ValueError, match="`defer` must stay None when `matmul` is given"):
            call()


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_call_refuses_it(fullgraph):
    for call in _calls(defer=Postponed()):
        torch._dynamo.reset()
        compiled = torch.compile(call, backend="eager", fullgraph=fullgraph)
        with pytest.raises(RuntimeError, match=r"`defer` must stay None under `torch.compile`"):
            compiled()
