"""Weights that a split backward does not leave for later are named, once, and no others."""

import warnings
from functools import partial

import pytest
import torch
from olmo_pipeline import PipelineExecutor, SplitRule, zero_bubble
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

F64 = torch.float64
WIDTH = 4
# It lives as long as the process: torch stumbles over names of operations that are gone.
LIBRARY = torch.library.Library("olmo_pipeline_tests", "FRAGMENT")


class _Product(torch.autograd.Function):
    """A linear operation written in Python, as libraries of quantised products have it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class PythonLinear(nn.Linear):
    def forward(self, x):
        return _Product.apply(x, self.weight)


class PartLinear(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, 2 * WIDTH, bias=False, dtype=F64)

    def forward(self, x):
        return x @ self.weight[WIDTH:].T


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, dtype=F64)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Recomputed(nn.Module):
    def __init__(self, body, *, reentrant):
        super().__init__()
        self.body, self.reentrant = body, reentrant

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


def _linear(kind=nn.Linear):
    return kind(WIDTH, WIDTH, bias=False, dtype=F64)


def _python():
    return _linear(PythonLinear)


def _compiled():
    return torch.compile(_linear(), backend="aot_eager")


def _said(stage, microbatches=3, **options):
    """The warnings of two runs of one executor."""
    executor = PipelineExecutor(
        zero_bubble(1, microbatches), {0: stage}, device="cpu", dtype=F64, **options
    )
    batch = [torch.randn(2, WIDTH, dtype=F64) for _ in range(microbatches)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            executor.run(batch, activation_shape=())
    return [str(each.message) for each in caught if each.category is UserWarning]


class Stage(nn.Sequential):
    def forward(self, hidden, x):
        return super().forward(x).sum(), None


INNER = "1.inner.in_proj_weight, 1.inner.out_proj.weight"
IN_PART = {
    "a linear operation in Python": (_python, "1.weight"),
    "attention of torch": (Attention, INNER),
    "a compiled layer": (_compiled, "1._orig_mod.weight"),
    "a part of a weight": (PartLinear, "1.weight"),
    "convolution": (lambda: nn.Conv1d(2, 2, 1, dtype=F64), "1.weight"),
    "recomputed": (lambda: Recomputed(_python(), reentrant=False), "1.body.weight"),
    "recomputed, reentrant": (lambda: Recomputed(_python(), reentrant=True), "1.body.weight"),
}


@pytest.mark.parametrize(("make", "names"), IN_PART.values(), ids=IN_PART)
def test_a_weight_that_does_not_wait_beside_one_that_does_is_named_once(make, names):
    (message,) = _said(Stage(_linear(), make()))
    assert message.startswith(
        f"the backward of stage 0 is split in part only: gradients of {names} are computed at "
        f"input_gradient, as no rule splits what uses them"
    )
    assert "pass `split_rules`" in message


class Positions(nn.Module):
    """A table that is added, one that is a factor and one that is looked up."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ParameterList(torch.randn(2, WIDTH, dtype=F64) for _ in range(4))

    def forward(self, x):
        added, factor, looked_up, indexed = self.tables
        rows = torch.arange(2)
        return (x + added) * factor + F.embedding(rows, looked_up) + indexed[rows]


class Parts(nn.Module):
    """Tables that are added or scaled by in part, and one of a norm over two dimensions."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ParameterList(torch.randn(3, WIDTH, dtype=F64) for _ in range(6))
        self.norm = nn.LayerNorm((2, WIDTH), dtype=F64)

    def forward(self, x):
        cut, row, whole, cast, divisor, gathered = self.tables
        y = x + cut[:2] - row[0].expand(2, -1) + whole[None][0, 1:] * cast.float().double()[:2]
        rows = torch.zeros(2, WIDTH, dtype=torch.int64)
        return self.norm(y / divisor[1:]) + gathered.gather(0, rows)


def _frozen():
    return _python().requires_grad_(False)


ALL_SPLIT = {
    "linear layers": _linear,
    "norms": lambda: nn.LayerNorm(WIDTH, dtype=F64),
    "no products": Positions,
    "no products of parts": Parts,
    "a frozen weight": _frozen,
    "recomputed": lambda: Recomputed(_linear(), reentrant=False),
    "recomputed, reentrant": lambda: Recomputed(_linear(), reentrant=True),
}


@pytest.mark.parametrize("make", ALL_SPLIT.values(), ids=ALL_SPLIT)
def test_nothing_is_said_where_all_products_wait(make):
    assert _said(Stage(_linear(), make())) == []


def test_a_rule_of_the_caller_or_none_on_purpose_ends_the_warning():
    rule = SplitRule(
        lambda gradient, x, weight: torch.mm(gradient, weight),
        lambda gradient, x, weight: (torch.bmm(gradient.T[None], x[None])[0],),
    )

    def product(x, weight):
        return torch.bmm(x[None], weight.T[None])[0]

    split, whole = _linear(), _linear()

    def stage(hidden, x):
        return torch.ops.olmo_pipeline_tests.whole(split(x), whole.weight).sum(), None

    LIBRARY.define("whole(Tensor x, Tensor weight) -> Tensor")
    LIBRARY.impl("whole", product, "CompositeImplicitAutograd")
    operator = torch.ops.olmo_pipeline_tests.whole
    assert len(_said(stage)) == 1
    assert _said(stage, split_rules={operator: rule}) == []
    # On purpose: only what that operation multiplies goes unnamed.
    assert _said(stage, split_rules={operator: None}) == []
    assert len(_said(stage, split_rules={torch.bmm: None})) == 1
    # Also where it is all there is.
    alone = Stage(_linear())
    assert _said(alone, split_rules={F.linear: None}) == []


class Holder:
    """A stage that is no module and holds one, as a training loop may have it."""

    def __init__(self, part):
        self.part = part

    def __call__(self, hidden, x):
        return self.part(x).sum(), None


def test_names_come_from_the_module_wherever_the_stage_holds_it():
    part = nn.Sequential(_linear(), _python())
    for stage in (Holder(part), Holder(part).__call__, Stage(*part).forward):
        (message,) = _said(stage)
        assert "gradients of 1.weight are" in message
    for stage in (lambda hidden, x: (part(x).sum(), None), partial(Holder.__call__, Holder(part))):
        (message,) = _said(stage)
        assert "gradients of a parameter of shape (4, 4) are" in message


def test_many_names_are_cut_short():
    (message,) = _said(Stage(_linear(), *[_python() for _ in range(11)]))
    assert message.count(".weight") == 8
    assert " and 3 more are computed" in message


def test_each_stage_is_named_once():
    stages = {
        0: lambda hidden, x: (parts[0](x), None),
        1: lambda hidden, x: (parts[1](hidden).sum(), None),
    }
    parts = [nn.Sequential(_linear(), _python()) for _ in stages]
    executor = PipelineExecutor(zero_bubble(1, 3, "v"), stages, device="cpu", dtype=F64)
    with pytest.warns(UserWarning, match=r"stage \d is split in part only") as caught:
        executor.run([torch.randn(2, WIDTH, dtype=F64)] * 3, activation_shape=(2, WIDTH))
    assert sorted(str(each.message)[:23] for each in caught) == [
        "the backward of stage 0",
        "the backward of stage 1",
    ]
