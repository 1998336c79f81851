"""Input and weight gradients apart, in one process: the gradients of a whole backward."""

import copy
import warnings
import weakref
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from olmo_pipeline import PipelineExecutor, SplitRule, dual_pipe_v, one_f_one_b, zero_bubble
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

F64 = torch.float64
WIDTH = 4


class Block(nn.Module):
    """A stage around a module: the first one reads the microbatch, the last one returns a loss."""

    def __init__(self, body, *, is_last, auxiliary=False):
        super().__init__()
        self.body, self.is_last, self.auxiliary = body, is_last, auxiliary

    def forward(self, hidden, microbatch):
        output = self.body(microbatch if hidden is None else hidden)
        auxiliary = (output**2).mean() if self.auxiliary else None
        return (torch.sin(output).sum() if self.is_last else output), auxiliary


def _train(schedule, stages, microbatches, **options):
    executor = PipelineExecutor(schedule, stages, device="cpu", dtype=F64, **options)
    executor.run(microbatches, activation_shape=lambda x: x.shape)


def _train_plainly(stages, microbatches):
    for microbatch in microbatches:
        hidden, total = None, 0.0
        for stage in range(len(stages)):
            hidden, auxiliary = stages[stage](hidden, microbatch)
            total = total + (0.0 if auxiliary is None else auxiliary)
        (hidden + total).backward()


def _check(bodies, schedule, parse=None, shape=(2, 3, WIDTH), **options):
    """Compare the split backward of `bodies` as stages with plain autograd on a copy."""
    last = len(bodies) - 1
    stages = {i: Block(b, is_last=i == last, auxiliary=i == 0) for i, b in enumerate(bodies)}
    plain = copy.deepcopy(stages)
    generator = torch.Generator().manual_seed(3)
    microbatches = [
        torch.randn(shape, generator=generator, dtype=F64) for _ in range(schedule.num_microbatches)
    ]
    _train_plainly(plain, microbatches)
    _train(schedule, stages, microbatches, **options)
    for stage in stages:
        expected = dict(plain[stage].named_parameters())
        for name, parameter in stages[stage].named_parameters():
            if expected[name].grad is None:
                assert parameter.grad is None
                continue
            torch.testing.assert_close(parameter.grad, expected[name].grad, msg=f"{stage} {name}")
    return stages


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH, dtype=F64)
        self.out = nn.Linear(WIDTH, WIDTH, dtype=F64)

    def forward(self, x):
        return x + self.out(F.scaled_dot_product_attention(*self.inputs(x).chunk(3, -1)))


class Composite(nn.Module):
    """The attention of torch is whole, the layer behind it is split."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dtype=F64)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=F64)

    def forward(self, x):
        return self.linear(self.inner(x, x, x, need_weights=False)[0])


class Product(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=F64)), how

    def forward(self, x):
        return self.how(x, self.weight)


class Twice(nn.Module):
    """One linear layer used twice, with an embedding-like use of its weight besides."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=F64)

    def forward(self, x):
        return self.linear(torch.tanh(self.linear(x))) + self.linear.weight[1]


class OtherProducts(nn.Module):
    """Weights that are a vector and a batch of matrices stay whole."""

    def __init__(self):
        super().__init__()
        self.vector = nn.Parameter(torch.randn(WIDTH, dtype=F64))
        self.matrices = nn.Parameter(torch.randn(2, WIDTH, WIDTH, dtype=F64))
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=F64)

    def forward(self, x):
        return self.linear(x) * (x @ self.vector)[..., None] + x @ self.matrices


class Recomputed(nn.Module):
    def __init__(self, body, *, reentrant):
        super().__init__()
        self.body, self.reentrant = body, reentrant

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


def _mlp(**options):
    return nn.Sequential(
        nn.LayerNorm(WIDTH, dtype=F64),
        nn.Linear(WIDTH, 7, dtype=F64, **options),
        nn.GELU(),
        nn.Linear(7, WIDTH, dtype=F64),
    )


def _frozen():
    body = _mlp()
    body[1].weight.requires_grad_(False)
    body[3].bias.requires_grad_(False)
    return body


BODIES = {
    "mlp": _mlp,
    "without bias": lambda: _mlp(bias=False),
    "partly frozen": _frozen,
    "attention": Attention,
    "attention of torch": Composite,
    "used twice": Twice,
    "matmul": lambda: Product(torch.matmul),
    "operator": lambda: Product(lambda x, w: x @ w),
    "mm": lambda: Product(lambda x, w: x.flatten(0, 1).mm(w).unflatten(0, (2, 3))),
    "keywords": lambda: Product(lambda x, w: F.linear(weight=w, input=x)),
    "transposed": lambda: Product(lambda x, w: torch.matmul(x, w.mT) + F.linear(x, w)),
    "product with a weight on the left": lambda: Product(lambda x, w: w[:3, :3] @ x + x @ w),
    "vector and batch": OtherProducts,
    "vmap": lambda: Product(lambda x, w: torch.func.vmap(lambda row: row @ w)(x) + x @ w),
    "recomputed": lambda: Recomputed(_mlp(), reentrant=False),
    "recomputed, reentrant": lambda: Recomputed(_mlp(), reentrant=True),
}


# What they name of the second stage's weights: a part of the gradient, at least, came at I.
IN_PART = {
    "attention of torch": "body.inner.in_proj_weight, body.inner.out_proj.weight",
    "transposed": "body.weight",
    "product with a weight on the left": "body.weight",
    "vector and batch": "body.matrices",
    "vmap": "body.weight",
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("schedule", [zero_bubble(1, 3, "v"), dual_pipe_v(1, 4)], ids=["v", "dual"])
def test_gradients_are_those_of_a_whole_backward(name, schedule):
    make = BODIES[name]
    # A reentrant recompute needs an input with gradients, which the first stage has not.
    first = nn.Linear(WIDTH, WIDTH, dtype=F64) if name == "recomputed, reentrant" else make()
    split = {a.stage for row in schedule.actions for a in row if a.kind == "input_gradient"}
    with _named(IN_PART.get(name), len(split)):
        _check([first, make()], schedule)


@contextmanager
def _named(names, num_stages):
    """Exactly one warning for each stage, which names the weights that did not wait, or none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(each.message) for each in caught]
    if names is None:
        assert messages == []
        return
    assert len(messages) == num_stages, messages
    for message in messages:
        assert f"is split in part only: gradients of {names} are computed at input" in message


def test_a_vector_and_no_rows():
    for shape in ((WIDTH,), (0, WIDTH), (2, 0, WIDTH)):
        _check([nn.Linear(WIDTH, WIDTH, dtype=F64), Product(torch.matmul)], zero_bubble(1, 2, "v"),
               shape=shape)  # fmt: skip


def test_weights_wait_for_their_action(parse_rows):
    schedule = parse_rows((0, 0), 2, "F0.0 F1.0 I1.0 I0.0 F0.1 W0.0 W1.0 F1.1 I1.1 I0.1 W1.1 W0.1")
    bodies = [_mlp(), _mlp()]
    seen = []

    def watch(stage, body):
        def call(x):
            seen.append([stage, body[1].weight.grad is None, body[3].bias.grad is None])
            seen[-1].append(body[0].weight.grad is None)
            return body(x)

        return call

    last = {
        0: Block(watch(0, bodies[0]), is_last=False),
        1: Block(watch(1, bodies[1]), is_last=True),
    }
    _train(schedule, last, [torch.randn(2, WIDTH, dtype=F64) for _ in range(2)])
    # After I0.0 and before W0.0 linear layers have no gradient, but the norm has one.
    assert seen == [
        [0, True, True, True],
        [1, True, True, True],
        [0, True, True, False],
        [1, False, False, False],
    ]


class _Marking(torch.Tensor):
    """A subclass, as distributed and quantised tensors are: operations on it may mean another."""


def test_a_tensor_subclass_stays_whole(parse_rows):
    linear = nn.Linear(WIDTH, WIDTH, dtype=F64)
    seen = []

    def stage(hidden, x):
        seen.append(linear.weight.grad is None)
        return linear(x.as_subclass(_Marking)).as_subclass(torch.Tensor).sum(), None

    schedule = parse_rows((0,), 2, "F0.0 I0.0 F0.1 W0.0 I0.1 W0.1")
    with pytest.warns(UserWarning, match="stage 0 could not be split"):
        _train(schedule, {0: stage}, [torch.randn(2, WIDTH, dtype=F64)] * 2)
    assert seen == [True, False]


def test_a_tied_weight_of_both_ends_is_counted_once(parse_rows):
    # On a V both ends lie on one rank: the lookup's gradient comes at I0, the head's at W1.
    table = nn.Parameter(torch.randn(6, WIDTH, dtype=F64))
    stages = {
        0: lambda hidden, tokens: (F.embedding(tokens, table), None),
        1: lambda hidden, tokens: (F.cross_entropy(F.linear(hidden, table), tokens), None),
    }
    batch = [torch.tensor([0, 2, 2]), torch.tensor([5, 1, 0])]
    for tokens in batch:
        stages[1](stages[0](None, tokens)[0], tokens)[0].backward()
    expected, table.grad = table.grad, None
    executor = PipelineExecutor(zero_bubble(1, 2, "v"), stages, device="cpu", dtype=F64)
    with pytest.warns(UserWarning, match="stage 0 could not be split"):  # a lookup stays whole
        executor.run(batch, activation_shape=(3, WIDTH))
    torch.testing.assert_close(table.grad, expected)


def test_hooks_see_one_sum_a_microbatch():
    body = nn.Module()
    body.linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=F64)
    body.forward = lambda x: body.linear(torch.tanh(body.linear(x)))
    added, seen = [], []
    body.linear.weight.register_post_accumulate_grad_hook(lambda weight: added.append(1))
    body.linear.weight.register_hook(lambda gradient: seen.append(gradient.norm()))
    _train(
        zero_bubble(1, 3), {0: Block(body, is_last=True)}, [torch.randn(2, WIDTH, dtype=F64)] * 3
    )
    assert (len(added), len(seen)) == (3, 3)


def test_autocast_multiplies_as_in_a_whole_backward():
    grads = []
    for schedule in (one_f_one_b(1, 2), zero_bubble(1, 2)):
        torch.manual_seed(1)
        body = nn.Linear(WIDTH, WIDTH)

        def stage(hidden, x, body=body):
            with torch.autocast("cpu", torch.bfloat16):
                output = body(x) @ body.weight
            assert output.dtype == torch.bfloat16
            return output.float().sin().sum(), None

        _train(schedule, {0: stage}, [torch.randn(3, WIDTH) for _ in range(2)])
        grads.append((body.weight.grad, body.bias.grad))
    for whole, split in zip(*grads, strict=True):
        assert split.dtype == torch.float32
        assert (whole - split).norm() <= 2**-7 * whole.norm()  # sums of bfloat16 products


def test_a_backward_inside_a_stage_is_refused():
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=F64))

    def stage(hidden, x):
        (x @ weight).sum().backward()
        return (x @ weight).sum(), None

    with pytest.raises(RuntimeError, match=r"at F0\.0, .*take a schedule without split backward"):
        _train(zero_bubble(1, 1), {0: stage}, [torch.randn(2, WIDTH, dtype=F64)])


class _Marked(torch.autograd.Function):
    """The identity; its node in the graph owns an object that can be watched."""

    @staticmethod
    def forward(ctx, x, marker):
        ctx.marker = marker
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Marker:
    pass


def test_a_tape_keeps_no_graph(parse_rows):
    graphs = []
    norm, linear = nn.LayerNorm(WIDTH, dtype=F64), nn.Linear(WIDTH, WIDTH, dtype=F64)

    def stage(hidden, x):
        if len(graphs) == 1:
            assert graphs[0]() is None, "the graph of a backward lives on after its I"
        marker = _Marker()
        graphs.append(weakref.ref(marker))
        return linear(_Marked.apply(norm(x), marker)).sum(), None

    schedule = parse_rows((0,), 2, "F0.0 I0.0 F0.1 W0.0 I0.1 W0.1")
    _train(schedule, {0: stage}, [torch.randn(2, WIDTH, dtype=F64)] * 2)
    assert len(graphs) == 2


def test_a_stage_that_cannot_be_split_is_whole_and_says_so_once():
    weight = torch.randn(WIDTH, WIDTH, dtype=F64, requires_grad=True)  # no parameter
    stages = {0: lambda hidden, x: ((x @ weight).sum(), None)}
    executor = PipelineExecutor(zero_bubble(1, 3), stages, device="cpu", dtype=F64)
    message = (
        r"backward of stage 0 could not be split: .* computed at input_gradient and its weight "
        r"gradient actions do nothing; pass `split_rules`"
    )
    x = torch.ones(2, WIDTH, dtype=F64)
    with pytest.warns(UserWarning, match=message) as caught:
        executor.run([x] * 3, activation_shape=())
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        executor.run([x] * 3, activation_shape=())
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 12.0))


def test_a_frozen_first_stage_needs_no_warning():
    first, second = nn.Linear(WIDTH, WIDTH, dtype=F64).requires_grad_(False), _mlp()
    stages = {
        0: lambda hidden, x: (first(x), None),
        1: lambda hidden, x: (second(hidden).sum(), None),
    }
    _train(zero_bubble(1, 2, "v"), stages, [torch.randn(2, WIDTH, dtype=F64)] * 2)
    assert first.weight.grad is None
    assert second[1].weight.grad is not None


def test_a_compiled_stage_stays_whole_and_right():
    body = _mlp()
    plain = copy.deepcopy(body)
    compiled = torch.compile(body, backend="aot_eager")
    batch = [torch.randn(3, WIDTH, dtype=F64) for _ in range(2)]
    with pytest.warns(UserWarning, match="in a compiled graph"):
        _train(zero_bubble(1, 2), {0: Block(compiled, is_last=True)}, batch)
    _train_plainly({0: Block(plain, is_last=True)}, batch)
    for (name, parameter), expected in zip(
        body.named_parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter.grad, expected.grad, msg=name)


@torch.library.custom_op("olmo_pipeline_tests::grouped", mutates_args=())
def _grouped(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows of group e times weight[e].T, as a library of kernels has it."""
    ends = [0, *offsets.tolist()]
    rows = [x[a:b] @ w.T for a, b, w in zip(ends, ends[1:], weight, strict=False)]
    return torch.cat(rows)


def _grouped_outer(gradient, x, weight, offsets):
    ends = [0, *offsets.tolist()]
    return (torch.stack([gradient[a:b].T @ x[a:b] for a, b in pairwise(ends)]),)


def _grouped_backward(ctx, gradient):
    x, weight, offsets = ctx.saved_tensors
    needs_x, needs_weight, _ = ctx.needs_input_grad
    dx = _grouped(gradient, weight.mT.contiguous(), offsets) if needs_x else None
    dw = _grouped_outer(gradient, x, weight, offsets)[0] if needs_weight else None
    return dx, dw, None


_grouped.register_autograd(
    _grouped_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH, dtype=F64))

    def forward(self, x):
        offsets = torch.tensor([2, 2, len(x)])
        return torch.tanh(_grouped(x, self.weight, offsets))


def test_an_operation_of_the_caller_splits_by_its_rule():
    calls = []

    def weights(*arguments):
        calls.append("weights")
        return _grouped_outer(*arguments)

    rule = SplitRule(
        input_gradient=lambda gradient, x, weight, offsets: (
            calls.append("input") or _grouped(gradient, weight.mT.contiguous(), offsets)
        ),
        weight_gradients=weights,
    )
    op = torch.ops.olmo_pipeline_tests.grouped.default
    _check([Experts(), Experts()], zero_bubble(1, 2, "v"), shape=(5, WIDTH), split_rules={op: rule})
    assert sorted(calls) == ["input"] * 2 + ["weights"] * 4  # stage 0 has no input gradient
    with pytest.warns(UserWarning, match=r"could not be split"):
        _check([Experts(), Experts()], zero_bubble(1, 2, "v"), shape=(5, WIDTH))
