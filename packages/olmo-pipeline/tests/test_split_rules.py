"""Rules of operations: torch's own, those of a caller, and what is refused."""

import re

import pytest
import torch
from olmo_pipeline import PipelineExecutor, SplitRule, zero_bubble
from torch import nn
from torch.nn import functional as F

F64 = torch.float64
WIDTH = 4


@pytest.mark.parametrize("shape", [(1,), (1, WIDTH), (), (WIDTH,)])
def test_a_bias_of_any_shape_that_torch_takes(shape):
    weight, bias = (nn.Parameter(torch.randn(each, dtype=F64)) for each in ((WIDTH, WIDTH), shape))
    batch = [torch.randn(5, WIDTH, dtype=F64) for _ in range(2)]

    def stage(hidden, x):
        return F.linear(x, weight, bias).square().sum(), None

    for x in batch:
        stage(None, x)[0].backward()
    expected = [weight.grad, bias.grad]
    weight.grad = bias.grad = None
    executor = PipelineExecutor(zero_bubble(1, 2), {0: stage}, device="cpu", dtype=F64)
    executor.run(batch, activation_shape=())
    torch.testing.assert_close([weight.grad, bias.grad], expected)


@pytest.mark.parametrize(
    ("made", "got"),
    [
        (lambda gradient, x, weight: (None,), "its argument 1, .* as its entry 0, got None"),
        (lambda gradient, x, weight: (), r"of its argument 1, .*\(4, 4\).* entry 0, got None"),
        (lambda gradient, x, weight: (x.mT,), r"as its entry 0, got \(4, 3\)"),
        (lambda gradient, x, weight: (None, x.mT @ gradient), "most .* input, 1, got 2"),
        (lambda gradient, x, weight: None, "input, 1, got a NoneType"),
    ],
)
def test_a_rule_that_leaves_a_weight_without_a_gradient_is_named(made, got):
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=F64))
    rule = SplitRule(lambda gradient, x, weight: gradient @ weight.mT, made)
    executor = PipelineExecutor(
        zero_bubble(1, 1),
        {0: lambda hidden, x: (torch.mm(x, weight).sum(), None)},
        device="cpu",
        dtype=F64,
        split_rules={torch.mm: rule},
    )
    with pytest.raises(RuntimeError, match=r"W0\.0") as caught:
        executor.run([torch.randn(3, WIDTH, dtype=F64)], activation_shape=())
    assert re.search(f"`weight_gradients` of the split rule of .*mm.* {got}", str(caught.value))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1f1b"}, "`schedule` must be a Schedule, got '1f1b'"),
        ({"stages": [print]}, "`stages` must be a Mapping, got "),
        ({"dtype": "float32"}, "`dtype` must be a dtype, got 'float32'"),
        ({"timeout": 5}, "`timeout` must be a timedelta, got 5"),
        ({"split_rules": [torch.bmm]}, "`split_rules` must be a .*Mapping"),
        ({"split_rules": {"bmm": None}}, "the function or operator .*, got None for 'bmm'"),
        ({"split_rules": {torch.bmm: "rule"}}, "must give a `SplitRule` or None .* got 'rule'"),
    ],
)
def test_arguments_of_a_wrong_kind(options, message):
    right = {"schedule": zero_bubble(1, 1), "stages": {0: print}, "dtype": F64, "device": "cpu"}
    with pytest.raises(TypeError, match=message):
        PipelineExecutor(**{**right, **options})


def test_a_rule_is_made_of_functions():
    with pytest.raises(TypeError, match="`weight_gradients` must be a function, got None"):
        SplitRule(print, None)
