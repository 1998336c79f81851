"""`defer`: weight gradients that are computed after the backward, bit for bit."""

import copy
import gc
import io
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mx_later import Postponed
from olmo_mxfp8 import (
    MXExperts,
    MXLinear,
    MXPacker,
    MXRecipe,
    WeightCache,
    mx_grouped_mm,
    mx_linear,
    mx_swiglu_experts,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

D, H = 32, 64
RECIPES = [
    MXRecipe(),
    MXRecipe(saved="mxfp8", grad_element="e5m2"),
    MXRecipe(input_grad="high"),
    MXRecipe(weight_grad="mxfp8"),
]


def _linear(leaves, offsets, **options):
    return mx_linear(leaves["x"].view(-1, 1, D), leaves["w"][0], **options).flatten(0, 1)


def _one_weight(leaves, offsets, **options):
    options["cache"] = (options.pop("caches", None) or [None])[0]
    return mx_grouped_mm(leaves["x"], leaves["w_gate_up"], offsets, **options)


def _experts(leaves, offsets, **options):
    stacks = (leaves["w_gate_up"], leaves["w_down"])
    return mx_swiglu_experts(
        leaves["x"], *stacks, offsets, row_weights_R=leaves["row_weights"], **options
    )


def _problem(sizes=(3, 0, 5), spare=2, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    rows, experts = sum(sizes) + spare, len(sizes)
    shapes = {
        "x": (rows, D),
        "row_weights": (rows,),
        "w_gate_up": (experts, 2 * H, D),
        "w_down": (experts, D, H),
    }
    tensors = {name: torch.randn(s, generator=draw).to(dtype) for name, s in shapes.items()}
    return tensors, torch.tensor(sizes).cumsum(0).int()


def _leaves(tensors, frozen=()):
    leaves = {
        name: nn.Parameter(tensor.clone()) if name[:2] == "w_" else tensor.clone()
        for name, tensor in tensors.items()
    }
    return {name: leaf.requires_grad_(name not in frozen) for name, leaf in leaves.items()}


def _gradients(call, leaves, offsets, **options):
    y = call(leaves, offsets, **options)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    defer = options.get("defer")
    if defer is not None:
        waiting = [weight for weights in defer.asked for weight in weights]
        assert all((weight.grad is None) == defer.waits for weight in waiting)
        assert defer.run() == len(defer.asked) * defer.waits
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def _assert_bits(got, want):
    for name, value in want.items():
        assert (got[name] is None) == (value is None), name
        assert value is None or torch.equal(got[name], value), name


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    recipe=st.sampled_from(RECIPES),
    call=st.sampled_from([_one_weight, _experts]),
    frozen=st.sets(st.sampled_from(["x", "row_weights", "w_down"])),
    cached=st.booleans(),
    waits=st.booleans(),
)
def test_gradients_have_the_bits_of_one_backward(sizes, recipe, call, frozen, cached, waits):
    tensors, offsets = _problem(tuple(sizes))
    results = []
    for defer in (None, Postponed(waits)):
        leaves = _leaves(tensors, frozen)
        caches = None
        if cached:
            caches = tuple(WeightCache(leaves[w], recipe=recipe) for w in ("w_gate_up", "w_down"))
        options = {"recipe": recipe, "caches": caches, "defer": defer}
        results.append(_gradients(call, leaves, offsets, **options))
    assert len(defer.asked) == 1
    _assert_bits(results[1], results[0])


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_a_linear_layer(recipe, bias, cached):
    torch.manual_seed(2)
    layer = MXLinear(D, H, bias=bias, recipe=recipe, cached=cached)
    x, dy = torch.randn(2, 3, D), torch.randn(2, 3, H)
    results = []
    for defer in (None, Postponed(waits=False), Postponed()):
        layer.zero_grad()
        layer.defer, leaf = defer, x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(dy)
        if defer is not None:
            assert defer.asked == [(layer.weight,)]
            assert (layer.weight.grad is None) == defer.waits
            defer.run()
        results.append([y.detach(), leaf.grad, *(p.grad for p in layer.parameters())])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_dtypes_are_those_of_the_weights():
    tensors, offsets = _problem(dtype=torch.bfloat16)
    tensors["w_down"] = tensors["w_down"].float()
    want = _gradients(_experts, _leaves(tensors), offsets)
    _assert_bits(_gradients(_experts, _leaves(tensors), offsets, defer=Postponed()), want)


def test_an_input_that_needs_no_gradient():
    """As that of a first stage: the output must have a backward all the same."""
    w, defer = nn.Parameter(torch.randn(H, D)), Postponed()
    y = mx_linear(torch.randn(3, D), w, defer=defer)
    y.sum().backward()
    assert defer.run() == 1
    assert w.grad.any()


def test_only_parameters_wait():
    tensors, offsets = _problem()
    want = _gradients(_experts, _leaves(tensors), offsets)
    leaves, defer = _leaves(tensors), Postponed()
    made = {**leaves, "w_gate_up": leaves["w_gate_up"] * 1}

    def call(_, offsets, **options):
        return _experts(made, offsets, **options)

    got = _gradients(call, leaves, offsets, defer=defer)
    assert defer.asked == [(leaves["w_down"],)]
    _assert_bits(got, want)
    defer = Postponed()
    _experts({name: t.requires_grad_() for name, t in tensors.items()}, offsets, defer=defer)
    with torch.no_grad():
        _experts(leaves, offsets, defer=defer)
    assert not defer.asked


def test_hooks_see_nothing_of_the_backward():
    tensors, offsets = _problem()
    leaves, seen = _leaves(tensors), []
    leaves["w_down"].register_hook(seen.append)
    leaves["w_down"].register_post_accumulate_grad_hook(seen.append)
    _gradients(_experts, leaves, offsets, defer=Postponed())
    assert seen == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute(reentrant):
    tensors, offsets = _problem()
    want = _gradients(_experts, _leaves(tensors), offsets)

    def recomputed(leaves, offsets, **options):
        def run(x):
            return _experts({**leaves, "x": x}, offsets, **options)

        return checkpoint(run, leaves["x"], use_reentrant=reentrant)

    leaves, defer = _leaves(tensors), Postponed()
    y = recomputed(leaves, offsets, defer=defer)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    assert defer.run() == 1
    _assert_bits({"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}, want)


def test_a_packer_around_the_layer_leaves_the_weights_as_they_are():
    tensors, offsets = _problem()
    packer, results = MXPacker(), []
    for defer in (None, Postponed()):
        with packer.saved_tensors(min_numel=1):
            results.append(_gradients(_experts, _leaves(tensors), offsets, defer=defer))
    _assert_bits(results[1], results[0])


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, marker):
        ctx.marker = marker
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Marker:
    pass


@pytest.mark.parametrize("call", [_one_weight, _experts])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_what_waits_keeps_no_graph_and_is_computed_once(call, recipe):
    tensors, offsets = _problem()
    leaves, defer, nodes = _leaves(tensors), Postponed(), []
    behind = dict(leaves)
    for name in ("x", "row_weights"):
        marker = _Marker()
        nodes.append(weakref.ref(marker))
        behind[name] = _Marked.apply(leaves[name], marker)
        del marker
    y = call(behind, offsets, recipe=recipe, defer=defer)
    y.backward(torch.ones_like(y))
    del y, behind
    gc.collect()
    assert [node() for node in nodes] == [None, None]
    (_, compute), *_ = defer.waiting
    compute()
    with pytest.raises(RuntimeError, match="must be computed once, got twice"):
        compute()


def test_what_is_held_until_then():
    tensors, offsets = _problem(sizes=(64, 64), spare=0, dtype=torch.bfloat16)
    leaves, defer = _leaves(tensors), Postponed()
    y = _experts(leaves, offsets, defer=defer)
    y.backward(torch.ones_like(y))
    (_, compute), *_ = defer.waiting
    (waiting,) = [cell.cell_contents for cell in compute.__closure__]
    held = {}
    for work in waiting:
        for operand in work.args[:2]:
            is_plain = isinstance(operand, torch.Tensor)
            parts = [operand] if is_plain else [operand.data, operand.scales]
            held |= {part.data_ptr(): part.nbytes for part in parts}
    R = 128
    assert sum(held.values()) == R * (D + 3 * H) * 33 / 32 + 2 * R * D


@pytest.mark.parametrize("layer", [MXLinear(D, D), MXExperts(2, D, D)])
def test_copies_and_pickles_of_a_layer_do_not_ask(layer):
    layer.defer = Postponed()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert other.defer is None
        for name, parameter in layer.named_parameters():
            assert torch.equal(other.get_parameter(name), parameter)
    assert "defer" not in layer.state_dict()


def test_the_module_of_experts_asks():
    experts, defer = MXExperts(3, D, H, cached=True), Postponed()
    experts.defer = defer
    tensors, offsets = _problem()
    experts(tensors["x"], offsets, row_weights_R=tensors["row_weights"]).sum().backward()
    assert defer.asked == [(experts.w_gate_up_E2HD, experts.w_down_EDH)]
    assert defer.run() == 1
    assert experts.w_down_EDH.grad.any()


@pytest.mark.parametrize("call", [_one_weight, _experts, _linear])
def test_what_is_no_function_is_refused(call):
    tensors, offsets = _problem()
    leaves = _leaves(tensors)
    leaves["w"] = nn.Parameter(torch.randn(1, H, D)) if call is _linear else None
    with pytest.raises(TypeError, match="`defer` must be a function or None, got 3"):
        call(leaves, offsets, defer=3)
    if call is not _linear:
        with pytest.raises(TypeError, match=r"`defer` must return None or a function .* got True"):
            call(leaves, offsets, defer=lambda weights: True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_caller_breaks_its_graph():
    torch._dynamo.reset()
    layer, defer = MXLinear(D, H), Postponed()
    x = torch.randn(3, D)
    layer(x).sum().backward()
    want = layer.weight.grad
    layer.zero_grad()
    layer.defer = defer
    torch.compile(layer, backend="eager")(x).sum().backward()
    assert layer.weight.grad is None
    assert defer.run() == 1
    assert torch.equal(layer.weight.grad, want)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="`defer` may be any function"):
        torch.compile(layer, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()
