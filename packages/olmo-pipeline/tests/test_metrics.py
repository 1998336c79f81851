"""What stages report besides losses: kept by stage and microbatch, on the rank of the stage."""

import pytest
import torch
from olmo_pipeline import (
    PipelineExecutor,
    dual_pipe_v,
    interleaved_one_f_one_b,
    one_f_one_b,
    v_shape,
    zero_bubble,
)
from torch import nn

F64 = torch.float64
WIDTH = 3


def _stages(schedule, rank):
    """y = x w: every stage but the second reports, the last one also whether it trains."""
    last = schedule.num_stages - 1
    weights = {s: nn.Parameter(torch.eye(WIDTH, dtype=F64) * (s + 2)) for s in range(last + 1)}

    def make(stage):
        def call(hidden, x):
            y = (x if hidden is None else hidden) @ weights[stage]
            output = y.sum() if stage == last else y
            if stage == 1:
                return output, None
            metrics = {
                "rows": torch.tensor([len(x), stage]),
                "largest": y.detach().amax(0),
                "empty": y.detach()[:0],
            }
            if stage == last:
                metrics["training"] = torch.tensor(torch.is_grad_enabled())
            return output, y.square().mean() if stage == 0 else None, metrics

        return call

    return {s: make(s) for s in schedule.stages_of(rank)}


def _check(rank, schedule):
    stages = _stages(schedule, rank)
    executor = PipelineExecutor(schedule, stages, device="cpu", dtype=F64)
    batch = [torch.full((n, WIDTH), 1.0 + n, dtype=F64) for n in range(1, 4)]
    last = schedule.num_stages - 1
    for training in (True, False, True):
        call = executor.run if training else executor.evaluate
        result = call(batch, activation_shape=lambda x: x.shape)
        held = [s for s in schedule.stages_of(rank) if s != 1]
        assert set(result.metrics) == {(s, i) for s in held for i in range(len(batch))}
        for (stage, i), metrics in result.metrics.items():
            product = torch.tensor([float(s + 2) for s in range(stage + 1)], dtype=F64).prod()
            assert metrics["rows"].tolist() == [i + 1, stage]
            expected = torch.full((WIDTH,), (i + 2.0) * product.item(), dtype=F64)
            torch.testing.assert_close(metrics["largest"], expected)
            assert metrics["empty"].shape == (0, WIDTH)
            assert ("training" in metrics) == (stage == last)
            if stage == last:
                assert metrics["training"].item() == training
        assert len(result.losses) == (len(batch) if last in stages else 0)
        assert set(result.auxiliaries) == {(0, i) for i in range(3) if 0 in held}
    executor.close()
    return sorted(result.metrics)


def test_chunks_of_one_rank_report():
    for schedule in (interleaved_one_f_one_b(1, 3, 3), zero_bubble(1, 3, "v")):
        _check(0, schedule)


def _report(rank, world):
    schedules = [one_f_one_b(world, 3), interleaved_one_f_one_b(world, 3, 2)]
    schedules += [v_shape(world, 3), zero_bubble(world, 3, "v"), dual_pipe_v(world, 3)]
    return [_check(rank, schedule) for schedule in schedules]


@pytest.mark.dist
def test_ranks_report_for_their_own_stages(processes):
    first, second = processes.run(_report, world=2)
    # One stage a rank, of which the second reports nothing; two in a loop; two on a V.
    reported = lambda *stages: [(s, i) for s in stages for i in range(3)]  # noqa: E731
    assert first == [reported(*stages) for stages in [(0,), (0, 2), (0, 3), (0, 3), (0, 3)]]
    assert second == [reported(*stages) for stages in [(), (3,), (2,), (2,), (2,)]]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (lambda x: [x], r"metrics of stage 0 must be a dict of tensors by name, got \(a tensor"),
        (lambda x: {"load": 1}, r"of stage 0 must be tensors by name, got int at 'load'"),
        (
            lambda x: {3: x.detach()},
            r"must be tensors by name, got a tensor of shape \(2, 3\) at 3",
        ),
        (lambda x: {"load": x}, r"must not carry gradients, 'load' does; detach it, or return it"),
    ],
)
def test_other_metrics_are_refused(metrics, message):
    weight = nn.Parameter(torch.eye(WIDTH, dtype=F64))

    def stage(hidden, x):
        y = x @ weight
        return y.sum(), None, metrics(y)

    executor = PipelineExecutor(one_f_one_b(1, 1), {0: stage}, device="cpu", dtype=F64)
    with pytest.raises(RuntimeError, match=r"at F0\.0, .*" + message):
        executor.run([torch.ones(2, WIDTH, dtype=F64)], activation_shape=())


def test_none_is_no_metrics_and_the_tensor_is_the_one_that_was_returned():
    weight, load = nn.Parameter(torch.eye(WIDTH, dtype=F64)), torch.zeros(2)

    def stage(hidden, x):
        return (x @ weight).sum(), None, {"load": load} if len(x) == 2 else None

    executor = PipelineExecutor(one_f_one_b(1, 2), {0: stage}, device="cpu", dtype=F64)
    result = executor.run([torch.ones(n, WIDTH, dtype=F64) for n in (1, 2)], activation_shape=())
    assert list(result.metrics) == [(0, 1)]
    assert result.metrics[0, 1]["load"] is load
