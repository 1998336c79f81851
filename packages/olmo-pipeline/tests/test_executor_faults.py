"""What a rank does wrong alone: every rank must hear of it at once, and none may compute with it.

The functions with `rank` and `world` run in worker processes.
"""

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from olmo_pipeline import (
    PipelineExecutor,
    Schedule,
    SplitRule,
    TiedParameter,
    one_f_one_b,
    zero_bubble,
)
from torch import nn

F64 = torch.float64
WIDTH = 5
pytestmark = pytest.mark.dist


def _stages(schedule, rank, last=None):
    """y = x w; `last` replaces what the last stage does with its hidden input and its weight."""
    weights = {
        s: nn.Parameter(torch.eye(WIDTH, dtype=F64) / (s + 1)) for s in schedule.stages_of(rank)
    }

    def make(stage, weight):
        def call(hidden, microbatch):
            if stage < schedule.num_stages - 1:
                return (microbatch if hidden is None else hidden) @ weight, None
            return ((hidden @ weight).sum(), None) if last is None else last(hidden, weight)

        return call

    return weights, {s: make(s, weight) for s, weight in weights.items()}


def _heard(function, *arguments, **options):
    """The error of a call that must not take long."""
    started = time.monotonic()
    try:
        function(*arguments, **options)
        message = "nothing"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - started
    assert seconds < 20, f"{seconds:.0f} s until {message}"
    return message


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("no backward")


def _fail_late(gradient, x, weight):
    raise ArithmeticError("no weight gradient")


LATE = SplitRule(input_gradient=lambda g, x, w: g @ w.T, weight_gradients=_fail_late)

# What the last stage does, and what its rank says.
LAST_STAGES = {
    "none": (lambda h, w: None, r"at F1\.0, .*stage 1 must return .*, got None\."),
    "a tensor alone": (lambda h, w: (h @ w).sum(), r"must return .*, got a tensor of shape \(\)"),
    # It could be taken apart like a pair of scalars.
    "two rows": (lambda h, w: (h @ w).sum(1), r"must return .*, got a tensor of shape \(2,\)"),
    "a number": (lambda h, w: (1.0, None), r"must return .*, got \(float, None\)"),
    "four": (lambda h, w: ((h @ w).sum(), None, {}, 1), r"got \(a tensor of .*, None, dict, int\)"),
    "no dict": (lambda h, w: ((h @ w).sum(), None, [h]), r"must be a dict of tensors by name, got"),
    "a grown metric": (lambda h, w: ((h @ w).sum(), None, {"h": h}), r"must not carry gradients"),
    "auxiliary number": (lambda h, w: ((h @ w).sum(), 0.0), r"a scalar tensor or None, got float"),
    "exception": (lambda h, w: {}["no key"], r"F1\.0, the forward of stage 1 .*0: 'no key'"),
    "backward": (lambda h, w: (_FailsBackward.apply(h @ w).sum(), None), r"at [BI]1\.0, .*: no b"),
}


def _meet_bad_stages(rank, world):
    heard = {}
    for name, (last, _) in LAST_STAGES.items():
        for schedule in (one_f_one_b(world, 3), zero_bubble(world, 3)):
            _, stages = _stages(schedule, rank, last)
            executor = PipelineExecutor(schedule, stages, device="cpu", dtype=F64)
            batch = [torch.ones(2, WIDTH, dtype=F64)] * 3
            first = _heard(executor.run, batch, activation_shape=(2, WIDTH))
            again = _heard(executor.run, batch, activation_shape=(2, WIDTH))
            heard[name, schedule.name] = first, again
    return heard


def test_a_bad_last_stage_is_named_there_and_ends_the_first(processes):
    first, last = processes.run(_meet_bad_stages, world=2)
    for (name, schedule), (message, again) in last.items():
        case = f"{name}, {schedule}"
        assert message.startswith("RuntimeError: pipeline rank 1 failed at "), case
        assert re.search(LAST_STAGES[name][1], message), f"{case}: {message}"
        assert "cannot run any more, rank 1 failed at" in again, case
        assert first[name, schedule][0].startswith("RuntimeError: pipeline rank 0 failed"), case
        assert "cannot run any more, rank 0 failed" in first[name, schedule][1], case


def _call_otherwise(rank, world):
    """Rank 1 makes another call than rank 0; each pair of calls ends on both."""
    batch = [torch.full((3, WIDTH), float(i + 1), dtype=F64) for i in range(2)]
    right = {"activation_shape": (3, WIDTH)}
    calls = {
        "longer": ("run", batch, {"activation_shape": (4, WIDTH)}),
        "shorter": ("run", batch, {"activation_shape": (2, WIDTH)}),
        "as long": ("run", batch, {"activation_shape": (WIDTH, 3)}),
        "no shape": ("run", batch, {"activation_shape": 15}),
        "failing shape": ("run", batch, {"activation_shape": lambda x: x.size(7)}),
        "too few": ("run", batch[:1], right),
        "evaluate": ("evaluate", batch, right),
    }
    heard = {}
    for name, (method, microbatches, options) in calls.items():
        _, stages = _stages(one_f_one_b(world, 2), rank)
        executor = PipelineExecutor(one_f_one_b(world, 2), stages, device="cpu", dtype=F64)
        if rank == 0:
            method, microbatches, options = "run", batch, right
        heard[name] = _heard(getattr(executor, method), microbatches, **options)
        assert "cannot run any more" in _heard(executor.run, batch, **right)
    # An evaluation that one rank ends early: what is left over must not be trained on.
    weights, stages = _stages(one_f_one_b(world, 2), rank)
    executor = PipelineExecutor(one_f_one_b(world, 2), stages, device="cpu", dtype=F64)
    messages = [
        _heard(executor.evaluate, (batch + batch)[: 4 - 2 * rank], **right),
        _heard(executor.run, batch, **right),
    ]
    heard["evaluate less"] = " ".join(messages)
    assert weights[rank].grad is None
    return heard


def test_calls_that_differ_are_named_and_end_both(processes):
    first, second = processes.run(_call_otherwise, world=2)
    for name in ("longer", "shorter", "as long"):
        assert "must give the same `activation_shape`" in second[name], f"{name}: {second[name]}"
    assert "`activation_shape` must be a sequence of whole numbers" in second["no shape"]
    assert "rank 1 failed before its first action" in second["failing shape"]
    assert second["too few"].startswith("ValueError: `microbatches` must hold 2, as many as")
    calls = r"rank 0 is in `run` of 2 microbatches, .* this rank in `evaluate` of 2 microbatches"
    assert re.search(calls, second["evaluate"])
    assert "rank 0 is in `evaluate` of 4 microbatches" in second["evaluate less"]
    for name, message in first.items():
        assert "RuntimeError: pipeline rank 0 failed" in message, f"{name}: {message}"


def _refuse_alone(rank, world):
    """A constructor that rank 1 alone refuses, by every argument; the group works afterwards."""
    schedule = one_f_one_b(world, 2)
    _, good = _stages(schedule, rank)
    right = {"schedule": schedule, "stages": good, "device": "cpu", "dtype": F64}
    other = Schedule(2, 2, 2, (schedule.actions[0][1:], schedule.actions[1]), (0, 1), "broken")
    faults = [
        {"stages": {0: good[rank]}},
        {"device": "meta"},
        {"dtype": torch.int64},
        {"schedule": other},
        {"schedule": one_f_one_b(3, 2)},
    ]
    messages = [
        _heard(PipelineExecutor, **(right if rank == 0 else {**right, **fault})) for fault in faults
    ]
    copy = {rank: nn.Parameter(torch.zeros(2))}
    messages.append(
        _heard(TiedParameter, schedule, copy if rank == 0 else {0: copy[1]}, device="cpu")
    )
    for stages in ([], [0, 2], [-1, 1]):
        messages.append(_heard(TiedParameter, schedule, copy, stages=stages, device="cpu"))
    executor = PipelineExecutor(**right)
    executor.run([torch.ones(1, WIDTH, dtype=F64)] * 2, activation_shape=(1, WIDTH))
    executor.close()
    return messages


def test_what_one_rank_refuses_is_refused_by_all(processes):
    first, second = processes.run(_refuse_alone, world=2)
    for message in first[:6]:
        assert "must bring valid arguments; rank(s) [1] refused theirs" in message
    words = ["`stages` of rank 1 must be [1]", "`device` must", "`dtype` must", "is missing"]
    words += ["`group` must have 3 ranks", "`copies` of rank 1 must"]
    for message, part in zip(second[:6], words, strict=True):
        assert part in message
    for messages in (first, second):
        assert all("`stages` must be some of the stages 0 to 1" in m for m in messages[6:])


def _train_on_nan(rank, world):
    """A value that is not finite goes its way in its own microbatch and hangs nobody."""
    schedule = zero_bubble(world, 3)
    weights, stages = _stages(schedule, rank)
    executor = PipelineExecutor(schedule, stages, device="cpu", dtype=F64)
    batch = [torch.ones(2, WIDTH, dtype=F64) for _ in range(3)]
    batch[1][0, 0] = float("nan")
    losses = executor.run(batch, activation_shape=(2, WIDTH)).losses
    is_nan = weights[rank].grad.isnan().any().item()
    weights[rank].grad = None
    again = executor.run(batch[::2] + batch[:1], activation_shape=(2, WIDTH)).losses
    assert weights[rank].grad.isfinite().all()
    return [loss.isnan().item() for loss in losses], is_nan, [x.item() for x in again]


def test_a_value_that_is_not_finite_stays_where_it_is(processes):
    first, last = processes.run(_train_on_nan, world=2)
    assert first == ([], True, [])
    assert last == ([False, True, False], True, [5.0] * 3)


def test_a_failing_weight_gradient_is_named():
    weight = nn.Parameter(torch.eye(WIDTH, dtype=F64))
    executor = PipelineExecutor(
        zero_bubble(1, 2),
        {0: lambda hidden, x: ((x @ weight).sum(), None)},
        device="cpu",
        dtype=F64,
        split_rules={torch.Tensor.matmul: LATE, torch.Tensor.__matmul__: LATE},
    )
    with pytest.raises(
        RuntimeError, match=r"at W0\.0, the weight_gradient of .*no weight gradient"
    ):
        executor.run([torch.ones(2, WIDTH, dtype=F64)] * 2, activation_shape=())


def _wait_too_long(rank, world):
    """Rank 1 comes later than `timeout` lets rank 0 wait, in a run and in the sum of a tie."""
    schedule = one_f_one_b(world, 2)
    short = timedelta(seconds=2)
    heard, seconds = [], []
    _, stages = _stages(schedule, rank)
    executor = PipelineExecutor(schedule, stages, device="cpu", dtype=F64, timeout=short)
    tied = TiedParameter(schedule, {rank: nn.Parameter(torch.ones(3))}, device="cpu", timeout=short)
    batch = [torch.ones(2, WIDTH, dtype=F64)] * 2
    for call in (lambda: executor.run(batch, activation_shape=(2, WIDTH)), tied.sum_gradients):
        started = time.monotonic()
        if rank == 0:
            heard.append(_heard(call))
            seconds.append(time.monotonic() - started)
        dist.barrier()  # of another group, with a timeout of its own
    return heard, seconds


def test_a_timeout_ends_the_wait_for_a_peer_that_does_not_come(processes):
    heard, seconds = processes.run(_wait_too_long, world=2)[0]
    assert heard[0].startswith("RuntimeError: pipeline rank 0 failed at B0.0, the backward of")
    assert all("imed out" in message for message in heard), heard
    assert all(1.5 < waited < 15 for waited in seconds), seconds
