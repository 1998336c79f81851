"""The executor in one process, without torch.distributed."""

import weakref

import pytest
import torch
from olmo_pipeline import (
    PipelineExecutor,
    interleaved_one_f_one_b,
    one_f_one_b,
    simulate,
)

F64 = torch.float64


def _linear_stages(num_stages, width=3):
    """Stages y = x w_s, the last one followed by a sum; an auxiliary loss in even stages."""
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(width, width, generator=generator, dtype=F64).requires_grad_()
        for _ in range(num_stages)
    ]

    def make(stage):
        def call(hidden, microbatch):
            assert (hidden is None) == (stage == 0)
            output = (microbatch if hidden is None else hidden) @ weights[stage]
            auxiliary = (weights[stage] ** 2).sum() * len(microbatch) if stage % 2 == 0 else None
            return (output**2).sum() if stage == num_stages - 1 else output, auxiliary

        return call

    return weights, {stage: make(stage) for stage in range(num_stages)}


def _microbatches(lengths, width=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, width, generator=generator, dtype=F64) for n in lengths]


def _oracle(weights, microbatches):
    """Losses and gradients of the plain sum, without stages."""
    copies = [weight.detach().clone().requires_grad_() for weight in weights]
    losses = []
    for microbatch in microbatches:
        hidden = microbatch
        for weight in copies:
            hidden = hidden @ weight
        losses.append((hidden**2).sum())
    auxiliary = sum((w**2).sum() * len(x) for x in microbatches for w in copies[::2])
    (sum(losses) + auxiliary).backward()
    return torch.stack(losses).detach(), [copy.grad for copy in copies]


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_chunks_of_one_rank_equal_one_graph(num_chunks):
    weights, stages = _linear_stages(num_chunks)
    microbatches = _microbatches([2, 0, 5, 1])
    executor = PipelineExecutor(
        interleaved_one_f_one_b(1, 4, num_chunks), stages, device="cpu", dtype=F64
    )
    result = executor.run(microbatches, activation_shape=lambda x: x.shape)
    losses, gradients = _oracle(weights, microbatches)
    torch.testing.assert_close(torch.stack(result.losses), losses)
    for weight, gradient in zip(weights, gradients, strict=True):
        torch.testing.assert_close(weight.grad, gradient)
    # Stage 0 counts: its auxiliary loss is there like any other.
    assert sorted(result.auxiliaries) == [(s, i) for s in range(0, num_chunks, 2) for i in range(4)]
    expected = (weights[0].detach() ** 2).sum() * 5
    torch.testing.assert_close(result.auxiliaries[0, 2], expected)
    assert not any(t.requires_grad for t in [*result.losses, *result.auxiliaries.values()])


def test_gradients_add_up_unscaled_over_calls():
    # Three calls of two microbatches, each with unit gradient: 6. A schedule that rescales what has
    # been accumulated gives a moving average, one that re-initialises keeps the last call only.
    weight = torch.zeros((), dtype=F64, requires_grad=True)
    stages = {
        0: lambda hidden, x: (weight * x, None),
        1: lambda hidden, x: (hidden * 1.0, None),
    }
    executor = PipelineExecutor(interleaved_one_f_one_b(1, 2, 2), stages, device="cpu", dtype=F64)
    for call in range(3):
        executor.run([1.0, 1.0], activation_shape=())
        assert weight.grad.item() == 2.0 * (call + 1)


def test_outputs_live_from_forward_to_backward_only():
    schedule = interleaved_one_f_one_b(1, 6, 3)
    outputs, most = [], 0
    _, stages = _linear_stages(3)

    def watch(stage):
        def call(hidden, microbatch):
            nonlocal most
            output, auxiliary = stages[stage](hidden, microbatch)
            outputs.append(weakref.ref(output))
            most = max(most, sum(reference() is not None for reference in outputs))
            return output, auxiliary

        return call

    executor = PipelineExecutor(schedule, {s: watch(s) for s in stages}, device="cpu", dtype=F64)
    executor.run(_microbatches([2] * 6), activation_shape=(2, 3))
    assert (most,) == simulate(schedule).peak_live_per_rank
    assert all(reference() is None for reference in outputs)


def test_evaluate_keeps_no_graph_and_takes_any_number():
    weights, stages = _linear_stages(2)
    executor = PipelineExecutor(interleaved_one_f_one_b(1, 2, 2), stages, device="cpu", dtype=F64)
    microbatches = _microbatches([1, 2, 3, 4, 5])
    result = executor.evaluate(microbatches, activation_shape=lambda x: x.shape)
    torch.testing.assert_close(torch.stack(result.losses), _oracle(weights, microbatches)[0])
    assert all(weight.grad is None for weight in weights)
    assert executor.evaluate([], activation_shape=(1, 3)).losses == []


def test_run_computes_gradients_under_no_grad():
    weights, stages = _linear_stages(1)
    executor = PipelineExecutor(one_f_one_b(1, 1), stages, device="cpu", dtype=F64)
    with torch.no_grad():
        executor.run(_microbatches([2]), activation_shape=(2, 3))
    assert weights[0].grad is not None


def test_a_frozen_first_stage_and_an_unused_input():
    weight = torch.ones((), dtype=F64, requires_grad=True)
    first = torch.ones((), dtype=F64, requires_grad=True)
    stages = {
        0: lambda hidden, x: (torch.full((2,), x, dtype=F64), None),
        1: lambda hidden, x: (first * hidden, None),
        2: lambda hidden, x: (weight * torch.ones(2, dtype=F64), None),
        3: lambda hidden, x: (hidden.sum(), None),
    }
    executor = PipelineExecutor(interleaved_one_f_one_b(1, 1, 4), stages, device="cpu", dtype=F64)
    executor.run([3.0], activation_shape=(2,))
    assert weight.grad.item() == 2.0
    assert first.grad.item() == 0.0


def _run_two(first, last, **options):
    schedule = interleaved_one_f_one_b(1, 1, 2)
    options = {"activation_shape": (2, 3), **options}
    executor = PipelineExecutor(schedule, {0: first, 1: last}, device="cpu", dtype=F64)
    return executor, lambda: executor.run([torch.ones(2, 3, dtype=F64)], **options)


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        (
            lambda h, x: (x[:1].clone(), None),
            lambda h, x: (h.sum(), None),
            r"at F0\.0, .*must return an activation of shape \(2, 3\) and torch\.float64, .* "
            r"got \(1, 3\) and torch\.float64",
        ),
        (
            lambda h, x: (x.float(), None),
            lambda h, x: (h.sum(), None),
            r"got \(2, 3\) and torch\.float32",
        ),
        (
            lambda h, x: (x * 1, None),
            lambda h, x: (h, None),
            r"at F1\.0, .*the last stage must return a scalar loss, got shape \(2, 3\)",
        ),
        (
            lambda h, x: (x * 1, x),
            lambda h, x: (h.sum(), None),
            r"the auxiliary loss of stage 0 must be a scalar, got shape \(2, 3\)",
        ),
        (
            lambda h, x: (x * 1, None),
            lambda h, x: (h.detach().sum(), None),
            r"output of stage 1 must depend on its input and carry gradients.*was it detached\?",
        ),
        (
            lambda h, x: (x * 1, None),
            lambda h, x: 1 / 0,
            r"pipeline rank 0 failed at F1\.0, the forward of stage 1 on microbatch 0: division",
        ),
    ],
)
def test_a_failing_stage_is_named_and_ends_the_executor(first, last, message):
    executor, run = _run_two(first, last)
    with pytest.raises(RuntimeError, match=message) as caught:
        run()
    assert caught.value.__cause__ is not None
    with pytest.raises(RuntimeError, match=r"cannot run any more, rank 0 failed at F\d\.0"):
        run()
    with pytest.raises(RuntimeError, match="cannot run any more"):
        executor.evaluate([], activation_shape=())


def test_a_failing_backward_is_named():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("no")

    _, run = _run_two(lambda h, x: (x * 1, None), lambda h, x: (Fails.apply(h).sum(), None))
    message = r"at B1\.0, the backward of stage 1 on microbatch 0: no"
    with pytest.raises(RuntimeError, match=message):
        run()


def test_a_closed_executor_says_so():
    executor, run = _run_two(lambda h, x: (x * 1, None), lambda h, x: (h.sum(), None))
    run()
    executor.close()
    with pytest.raises(RuntimeError, match="cannot run any more, it was closed; build a new one"):
        run()


def test_arguments_are_checked(parse_rows):
    stages = {0: lambda h, x: (x.sum(), None)}
    good = {"device": "cpu", "dtype": F64}
    schedule = one_f_one_b(1, 2)
    with pytest.raises(ValueError, match=r"rank 0: B0\.0 is missing"):
        PipelineExecutor(parse_rows((0,), 1, "F0.0"), stages, **good)
    with pytest.raises(ValueError, match=r"`stages` of rank 0 must be \[0\], got \[0, 1\]"):
        PipelineExecutor(schedule, {**stages, 1: stages[0]}, **good)
    with pytest.raises(ValueError, match=r"`device` must be a CPU or CUDA device, got meta"):
        PipelineExecutor(schedule, stages, device="meta", dtype=F64)
    with pytest.raises(ValueError, match=r"`dtype` must be a floating type, got torch\.int64"):
        PipelineExecutor(schedule, stages, device="cpu", dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"schedule of 2 ranks needs torch\.distributed; call"):
        PipelineExecutor(one_f_one_b(2, 2), stages, **good)
    executor = PipelineExecutor(schedule, stages, **good)
    with pytest.raises(ValueError, match=r"`microbatches` must hold 2, .* got 3"):
        executor.run([1, 2, 3], activation_shape=())
