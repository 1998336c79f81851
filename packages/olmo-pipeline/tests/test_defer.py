"""Layers with a backward of their own, whose weight gradients `executor.defer` leaves for later."""

import copy
import warnings
import weakref
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_pipeline import (
    PipelineExecutor,
    dual_pipe_v,
    gpipe,
    one_f_one_b,
    search,
    v_shape,
    zero_bubble,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

F64 = torch.float64
WIDTH = 4
SPLIT = {
    "zero_bubble h1": zero_bubble(1, 3),
    "zero_bubble v": zero_bubble(1, 3, "v"),
    "dual_pipe_v": dual_pipe_v(1, 4),
    "search": search(1, 3, memory_cap=4, split_backward=True, tries=5),
}
WHOLE = {"gpipe": gpipe(1, 3), "1f1b": one_f_one_b(1, 3), "v": v_shape(1, 3)}


class _Product(torch.autograd.Function):
    """`x @ w.T` with a backward in Python, as quantised and fused layers have it."""

    @staticmethod
    def forward(ctx, anchor, x, weight, later):
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        rows, inputs = dy.reshape(-1, WIDTH), x.reshape(-1, WIDTH)
        if ctx.later is None:
            return None, dy @ weight, rows.T @ inputs, None
        ctx.later(lambda: (rows.T @ inputs,))
        return None, dy @ weight, None, None


class Deferring(nn.Linear):
    """A layer that asks; the answers are kept for the tests."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH, bias=False, dtype=F64)
        self.defer, self.answers = None, []

    def forward(self, x):
        later = None
        if self.defer is not None and self.weight.requires_grad and torch.is_grad_enabled():
            later = self.defer((self.weight,))
            self.answers.append(later is not None)
        weight = self.weight if later is None else self.weight.detach()
        anchor = None if later is None else torch.empty((), requires_grad=True)
        return _Product.apply(anchor, x, weight, later)


class Stack(nn.Module):
    """A body as a stage, with a norm in front and an auxiliary loss."""

    def __init__(self, body, *, is_last):
        super().__init__()
        self.norm, self.body, self.is_last = nn.LayerNorm(WIDTH, dtype=F64), body, is_last

    def forward(self, hidden, microbatch):
        y = self.body(self.norm(microbatch if hidden is None else hidden))
        return (torch.sin(y).sum() if self.is_last else y), (y**2).mean()


class Recomputed(nn.Module):
    def __init__(self, body, *, reentrant):
        super().__init__()
        self.body, self.reentrant = body, reentrant

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class Tied(nn.Module):
    """One weight in three calls of a layer that asks, and in one of torch."""

    def __init__(self):
        super().__init__()
        self.layer = Deferring()

    def forward(self, x):
        y = torch.tanh(self.layer(torch.tanh(self.layer(x))))
        return F.linear(torch.tanh(self.layer(y)), self.layer.weight)


BODIES = {
    "one": lambda: nn.Sequential(Deferring()),
    "beside layers of torch": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH, dtype=F64), nn.Tanh(), Deferring(), nn.Tanh(), Deferring()
    ),
    "tied": Tied,
    "recomputed": lambda: Recomputed(nn.Sequential(Deferring(), nn.Tanh()), reentrant=False),
    "recomputed, reentrant": lambda: Recomputed(
        nn.Sequential(Deferring(), nn.Tanh()), reentrant=True
    ),
}


@contextmanager
def _no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _layers(stages):
    return [m for stage in stages.values() for m in stage.modules() if isinstance(m, Deferring)]


def _run(schedule, stages, microbatches):
    executor = PipelineExecutor(schedule, stages, device="cpu", dtype=F64)
    for layer in _layers(stages):
        layer.defer, layer.answers = executor.defer, []
    executor.run(microbatches, activation_shape=lambda x: x.shape)
    return executor


def _stages(body, schedule):
    torch.manual_seed(0)
    last = schedule.num_stages - 1
    return {i: Stack(BODIES[body](), is_last=i == last) for i in range(schedule.num_stages)}


def _batch(count, shape=(2, 3, WIDTH)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=F64) for _ in range(count)]


def _assert_plain_gradients(stages, plain, batch):
    for microbatch in batch:
        hidden, total = None, 0.0
        for stage in range(len(plain)):
            hidden, auxiliary = plain[stage](hidden, microbatch)
            total = total + auxiliary
        (hidden + total).backward()
    for stage, module in stages.items():
        for (name, got), want in zip(
            module.named_parameters(), plain[stage].parameters(), strict=True
        ):
            torch.testing.assert_close(got.grad, want.grad, msg=f"{stage} {name}")


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("schedule", SPLIT.values(), ids=SPLIT)
def test_gradients_are_those_of_one_process_and_nothing_is_said(body, schedule):
    stages, batch = _stages(body, schedule), _batch(schedule.num_microbatches)
    plain = copy.deepcopy(stages)
    with _no_warning():
        _run(schedule, stages, batch)
    _assert_plain_gradients(stages, plain, batch)
    split = {a.stage for row in schedule.actions for a in row if a.kind == "input_gradient"}
    for stage in split:
        assert any(_layers({stage: stages[stage]})[0].answers), stage


@pytest.mark.parametrize("body", ["one", "recomputed", "recomputed, reentrant"])
@pytest.mark.parametrize("schedule", WHOLE.values(), ids=WHOLE)
def test_a_whole_schedule_leaves_nothing(body, schedule):
    stages, batch = _stages(body, schedule), _batch(3)
    plain = copy.deepcopy(stages)
    _run(schedule, stages, batch)
    _assert_plain_gradients(stages, plain, batch)
    assert not any(answer for layer in _layers(stages) for answer in layer.answers)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(uses=st.lists(st.booleans(), min_size=1, max_size=5), microbatches=st.integers(1, 3))
def test_any_mixture_of_uses_of_a_weight_is_one_gradient_with_the_bits_of_a_whole_backward(
    uses, microbatches
):
    results = []
    for make in (one_f_one_b, zero_bubble):
        torch.manual_seed(0)
        layer, seen, added = Deferring(), [], []
        layer.weight.register_hook(seen.append)
        layer.weight.register_post_accumulate_grad_hook(lambda weight, a=added: a.append(1))

        def stage(hidden, x, layer=layer):
            for asks in uses:
                x = torch.tanh(layer(x) if asks else F.linear(x, layer.weight))
            return x.sum(), None

        executor = PipelineExecutor(make(1, microbatches), {0: stage}, device="cpu", dtype=F64)
        layer.defer = executor.defer
        with _no_warning():
            executor.run(_batch(microbatches), activation_shape=())
        assert len(seen) == len(added) == microbatches
        assert all(isinstance(gradient, torch.Tensor) for gradient in seen)
        results.append(layer.weight.grad)
    assert torch.equal(*results)


def test_gradients_come_at_w_and_tensors_are_freed_then(parse_rows):
    schedule = parse_rows((0,), 2, "F0.0 I0.0 F0.1 I0.1 W0.0 W0.1")
    layers = nn.Sequential(Deferring(), Deferring())
    left, freed, at_hook = [], [], []

    class Kept:
        def __init__(self, name):
            left.append(name)
            weakref.finalize(self, freed.append, name)

    def asking(number, defer):
        def ask(weights):
            assert weights == (layers[number].weight,)
            later = defer(weights)

            def hand_over(compute):
                kept = Kept(number)
                later(lambda kept=kept: compute())

            return hand_over

        return ask

    def stage(hidden, x):
        assert all(layer.weight.grad is None for layer in layers)
        return layers(x).sum(), None

    executor = PipelineExecutor(schedule, {0: stage}, device="cpu", dtype=F64)
    for number, layer in enumerate(layers):
        layer.defer = asking(number, executor.defer)
        # When the gradient of one arrives, what it was made of is gone, and no more than that.
        layer.weight.register_hook(lambda _, n=number: at_hook.append((n, freed.count(n))))
    executor.run(_batch(2), activation_shape=())
    assert left == freed == [1, 0, 1, 0]
    assert at_hook == [(1, 1), (0, 1), (1, 2), (0, 2)]


def test_what_waits_keeps_no_graph(parse_rows):
    graphs = []
    norm, layer = nn.LayerNorm(WIDTH, dtype=F64), Deferring()

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, marker):
            ctx.marker = marker
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient, None

    class Marker:
        pass

    def stage(hidden, x):
        if graphs:
            assert graphs[0]() is None, "the graph of a backward lives on after its I"
        marker = Marker()
        graphs.append(weakref.ref(marker))
        return layer(Marked.apply(norm(x), marker)).sum(), None

    schedule = parse_rows((0,), 2, "F0.0 I0.0 F0.1 W0.0 I0.1 W0.1")
    executor = PipelineExecutor(schedule, {0: stage}, device="cpu", dtype=F64)
    layer.defer = executor.defer
    executor.run(_batch(2), activation_shape=())


def test_none_is_a_gradient_that_went_elsewhere():
    layer, buffer = Deferring(), torch.zeros(WIDTH, WIDTH, dtype=F64)
    stages = {0: lambda hidden, x: (layer(x).sum(), None)}
    executor = PipelineExecutor(zero_bubble(1, 2), stages, device="cpu", dtype=F64)

    def ask(weights):
        later = executor.defer(weights)

        def add(compute):
            buffer.add_(compute()[0])
            return (None,)

        return lambda compute: later(partial(add, compute))

    layer.defer = ask
    with _no_warning():
        executor.run(_batch(2), activation_shape=())
    assert layer.weight.grad is None
    assert buffer.any()


@pytest.mark.parametrize(
    ("made", "message"), [((), "got 0"), ((None, None), "got 2"), (7, "got int")]
)
def test_another_number_of_gradients_is_an_error(made, message):
    layer = Deferring()
    stages = {0: lambda hidden, x: (layer(x).sum(), None)}
    executor = PipelineExecutor(zero_bubble(1, 1), stages, device="cpu", dtype=F64)

    def ask(weights):
        later = executor.defer(weights)
        return lambda compute: later(lambda: made)

    layer.defer = ask
    with pytest.raises(RuntimeError, match=rf"at W0\.0, .* must return one a weight, 1, {message}"):
        executor.run(_batch(1), activation_shape=())


def test_weights_are_a_tuple_of_parameters():
    layer = Deferring()
    stages = {0: lambda hidden, x: (layer(x).sum(), None)}
    executor = PipelineExecutor(zero_bubble(1, 1), stages, device="cpu", dtype=F64)
    for weights in (layer.weight, [layer.weight], (layer.weight.T,)):
        with pytest.raises(TypeError, match=r"`weights` must be a tuple of `nn\.Parameter`"):
            executor.defer(weights)


def test_outside_of_a_split_backward_nothing_waits():
    layer = Deferring()
    stages = {0: lambda hidden, x: (layer(x).sum(), None)}
    executor = PipelineExecutor(zero_bubble(1, 2), stages, device="cpu", dtype=F64)
    layer.defer = executor.defer
    assert executor.defer((layer.weight,)) is None
    executor.run(_batch(2), activation_shape=())
    assert layer.answers == [True, True]
    with torch.enable_grad():
        layer(_batch(1)[0]).sum().backward()
    assert layer.answers.pop() is False
    executor.evaluate(_batch(3), activation_shape=())
    assert layer.answers == [True, True]  # without gradients it does not ask


@pytest.mark.parametrize("recompute", [None, True, False])
def test_a_backward_inside_a_stage_is_refused(recompute):
    layer = Deferring()

    def inner(x):
        (layer(x) ** 2).sum().backward()
        return layer(x)

    def stage(hidden, x):
        x = x.requires_grad_()
        y = inner(x) if recompute is None else checkpoint(inner, x, use_reentrant=recompute)
        return y.sum(), None

    executor = PipelineExecutor(zero_bubble(1, 1), {0: stage}, device="cpu", dtype=F64)
    layer.defer = executor.defer
    # A reentrant checkpoint runs its first forward without gradients, so this one has no graph.
    with pytest.raises(RuntimeError, match=r"take a schedule without split|does not require grad"):
        executor.run(_batch(1), activation_shape=())
    assert executor.defer((layer.weight,)) is None, "a failed forward ends its tape"


def test_a_layer_that_does_not_ask_is_named_beside_one_that_does():
    stage = Stack(nn.Sequential(Deferring(), Deferring()), is_last=True)
    executor = PipelineExecutor(zero_bubble(1, 2), {0: stage}, device="cpu", dtype=F64)
    stage.body[0].defer = executor.defer
    with pytest.warns(UserWarning, match="gradients of body.1.weight are .* `executor.defer`"):
        executor.run(_batch(2), activation_shape=())


class _Forgetful(Deferring):
    """It asks and never hands over what computes its gradient."""

    def forward(self, x):
        later = self.defer((self.weight,))
        weight = self.weight if later is None else self.weight.detach()
        return F.linear(x, weight)


def test_a_layer_that_asks_and_never_hands_over_is_named_once():
    body = nn.Sequential(Deferring(), _Forgetful())
    executor = PipelineExecutor(
        zero_bubble(1, 3), {0: Stack(body, is_last=True)}, device="cpu", dtype=F64
    )
    for layer in body:
        layer.defer = executor.defer
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        executor.run([torch.randn(2, WIDTH, dtype=F64) for _ in range(3)], activation_shape=())
    (message,) = [str(each.message) for each in caught]
    assert message.startswith("gradients of body.1.weight are not computed: a layer of stage 0")
    assert body[1].weight.grad is None
