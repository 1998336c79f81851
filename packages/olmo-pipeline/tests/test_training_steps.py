"""Steps by hand over gloo: accumulation, logging, clipping and evaluation, as a loop does them.

Each test is a fault that people met in pipelines: gradients rescaled by the number of calls, ranks
without routed layers that hang in a collective, a norm for each stage, an evaluation that divides.
"""

import pytest
import torch
import torch.distributed as dist
from olmo_pipeline import (
    PipelineExecutor,
    dual_pipe_v,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    v_shape,
    zero_bubble,
)
from torch import nn

F64 = torch.float64
WIDTH = 4
pytestmark = pytest.mark.dist


def _schedules(num_ranks, count):
    return [
        gpipe(num_ranks, count),
        one_f_one_b(num_ranks, count),
        interleaved_one_f_one_b(num_ranks, count, 2),
        v_shape(num_ranks, count),
        zero_bubble(num_ranks, count, "h1"),
        zero_bubble(num_ranks, count, "v"),
        dual_pipe_v(num_ranks, count),
    ]


def _accumulate(rank, world):
    for count in (1, 2, 4):
        for schedule in _schedules(world, count):
            last = schedule.num_stages - 1
            # Every stage is y = w x, from w = 1: the gradient of a mean of ones is 1 in each call.
            weights = {
                s: nn.Parameter(torch.ones(1, 1, dtype=F64)) for s in schedule.stages_of(rank)
            }

            def make(stage, weights=weights, last=last, count=count):
                def call(hidden, x):
                    y = (x if hidden is None else hidden) @ weights[stage]
                    return (y.mean() / count if stage == last else y), None

                return call

            executor = PipelineExecutor(
                schedule, {s: make(s) for s in weights}, device="cpu", dtype=F64
            )
            for turn in range(3):
                batch = [torch.ones(1 + turn + i, 1, dtype=F64) for i in range(count)]
                executor.run(batch, activation_shape=lambda x: x.shape)
                for stage, weight in weights.items():
                    message = f"{schedule.name}, stage {stage}, {count} microbatches, call {turn}"
                    assert weight.grad.item() == pytest.approx(turn + 1, rel=1e-12), message
            executor.close()


def test_calls_add_up_and_nothing_is_rescaled(processes):
    processes.run(_accumulate, world=2)


class Layer(nn.Module):
    """Dense, or routed with a balancing loss of its own."""

    def __init__(self, index, *, routed):
        super().__init__()
        torch.manual_seed(index)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=F64)
        self.router = nn.Linear(WIDTH, 3, bias=False, dtype=F64) if routed else None

    def forward(self, x):
        auxiliary = None
        if self.router is not None:
            scores = self.router(x).softmax(-1)
            auxiliary = (scores.mean(0) ** 2).sum()
            x = x * scores[:, :1]
        return x + torch.tanh(self.linear(x)), auxiliary


def _layers():
    return [Layer(i, routed=i >= 2) for i in range(4)]  # dense, dense, routed, routed


def _as_stages(layers, num_stages, num_microbatches):
    size = len(layers) // num_stages

    def make(stage):
        def call(hidden, microbatch):
            x, auxiliaries = microbatch if hidden is None else hidden, []
            for layer in layers[stage * size : (stage + 1) * size]:
                x, auxiliary = layer(x)
                auxiliaries += [] if auxiliary is None else [auxiliary]
            if stage == num_stages - 1:
                x = (x**2).mean() / num_microbatches
            return x, sum(auxiliaries) / num_microbatches if auxiliaries else None

        return call

    return [make(stage) for stage in range(num_stages)]


def _everywhere(value, op=dist.ReduceOp.SUM):
    """Every rank takes part, with zero where it has nothing."""
    value = torch.as_tensor(value, dtype=F64)
    dist.all_reduce(value, op=op)
    return value.item()


def _clip(parameters, norm, most):
    for parameter in parameters:
        parameter.grad.mul_(min(1.0, most / norm))


def _steps_of_one_process(batches):
    layers, record = _layers(), []
    parameters = [p for layer in layers for p in layer.parameters()]
    for number, batch in enumerate(batches):
        stages = _as_stages(layers, 1, len(batch))
        logged = [0.0, 0.0]
        for microbatch in batch:
            loss, auxiliary = stages[0](None, microbatch)
            (loss + auxiliary).backward()
            logged[0] += loss.item()
            logged[1] += auxiliary.item()
        kind = 2.0 if number % 2 == 0 else float("inf")
        norm = torch.linalg.vector_norm(
            torch.cat([p.grad.flatten() for p in parameters]), kind
        ).item()
        _clip(parameters, norm, 0.1)
        record.append([*logged, norm])
        _descend(parameters)
    return record


def _descend(parameters):
    for parameter in parameters:
        with torch.no_grad():
            parameter -= parameter.grad
        parameter.grad = None


def _steps(rank, world):
    generator = torch.Generator().manual_seed(5)
    batches = [
        [torch.randn(2 + i, WIDTH, generator=generator, dtype=F64) for i in range(3)]
        for _ in range(4)
    ]
    expected = _steps_of_one_process(batches)
    for schedule in _schedules(world, 3):
        layers = _layers()
        size = len(layers) // schedule.num_stages
        functions = _as_stages(layers, schedule.num_stages, 3)
        held = schedule.stages_of(rank)
        executor = PipelineExecutor(
            schedule, {s: functions[s] for s in held}, device="cpu", dtype=F64
        )
        own = [
            p for s in held for layer in layers[s * size : (s + 1) * size]
            for p in layer.parameters()
        ]  # fmt: skip
        for number, batch in enumerate(batches):
            result = executor.run(batch, activation_shape=lambda x: x.shape)
            routed = {s for s in held if s >= schedule.num_stages // 2}
            assert {stage for stage, _ in result.auxiliaries} == routed
            logged = [
                _everywhere(sum(result.losses, torch.zeros(()))),
                _everywhere(sum(result.auxiliaries.values(), torch.zeros(()))),
            ]
            if number % 2 == 0:
                norm = _everywhere(sum(p.grad.square().sum() for p in own)) ** 0.5
            else:
                most = max(p.grad.abs().max() for p in own)
                norm = _everywhere(most, dist.ReduceOp.MAX)
            _clip(own, norm, 0.1)
            assert [*logged, norm] == pytest.approx(expected[number], rel=1e-10), schedule.name
            _descend(own)
        executor.close()


def test_ranks_without_routed_layers_log_and_clip_like_one_process(processes):
    processes.run(_steps, world=2)


def _evaluate_by_tokens(rank, world):
    """Eleven sequences in calls of four, the last one partial: the mean is over tokens."""
    lengths = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    generator = torch.Generator().manual_seed(6)
    sequences = [torch.randn(n, WIDTH, generator=generator, dtype=F64) for n in lengths]
    means = []
    for schedule in _schedules(world, 2):
        torch.manual_seed(0)
        weights = [torch.randn(WIDTH, WIDTH, dtype=F64) for _ in range(schedule.num_stages)]
        last = schedule.num_stages - 1

        def make(stage, weights=weights, last=last):
            def call(hidden, x):
                assert not torch.is_grad_enabled()
                y = torch.tanh((x if hidden is None else hidden) @ weights[stage])
                return (y.square().sum() if stage == last else y), None

            return call

        stages = {s: make(s) for s in schedule.stages_of(rank)}
        executor = PipelineExecutor(schedule, stages, device="cpu", dtype=F64)
        total = torch.zeros((), dtype=F64)
        for first in range(0, len(sequences), 4):
            part = sequences[first : first + 4]
            total += sum(executor.evaluate(part, activation_shape=lambda x: x.shape).losses)
        executor.close()
        rows = torch.cat(sequences)
        for weight in weights:
            rows = torch.tanh(rows @ weight)
        expected = rows.square().sum().item() / len(rows)
        means.append((_everywhere(total) / sum(lengths), expected))
    return means


def test_a_partial_evaluation_is_weighted_by_tokens(processes):
    for means in processes.run(_evaluate_by_tokens, world=2):
        for mean, expected in means:
            assert mean == pytest.approx(expected, rel=1e-12)
