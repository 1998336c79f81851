import pytest
import torch
import torch.distributed as dist
from olmo_distopt import (
    GradientReducer,
    ReplicaGroups,
    ShardedAdamW,
    ShardedMuon,
    memory_report,
)
from torch import nn


def _report(rank, world, kind, moment_dtype):
    """BF16 weights: dense ones on both ranks, an expert's on one alone, a tiny norm kept whole."""
    groups = ReplicaGroups(
        {"dense": dist.group.WORLD, "expert": None}, lambda name, _: name.partition(".")[0]
    )
    values = {
        "dense.up": (64, 64),
        "dense.down": (64, 64),
        "dense.norm": (64,),
        "expert.w": (2, 64, 64),
    }
    named = [(name, nn.Parameter(torch.ones(shape).bfloat16())) for name, shape in values.items()]
    frozen = [("dense.frozen", nn.Parameter(torch.ones(9), requires_grad=False))]
    reducer = GradientReducer(named, groups)
    make = {"adamw": ShardedAdamW, "muon": ShardedMuon}[kind]
    optimizer = make(named, groups, lr=0.1, moment_dtype=moment_dtype)
    report = memory_report(named + frozen, groups, optimizer)
    reducer.close()
    without = memory_report(named, groups, optimizer)
    assert (without.gradients.measured, without.weights) == (0, report.weights)
    return report


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "moment_dtype", "state", "norm_state"),
    [
        ("adamw", torch.float32, 12, 12),
        ("adamw", torch.bfloat16, 8, 8),
        ("muon", torch.float32, 8, 12),
        ("muon", torch.bfloat16, 6, 8),
    ],
)
def test_bytes_a_parameter(processes, kind, moment_dtype, state, norm_state):
    dense, expert, norm = 2 * 64 * 64, 2 * 64 * 64, 64
    numel = dense + expert + norm
    for report in processes.run(_report, kind, moment_dtype, world=2):
        assert report.num_parameters == numel
        assert report.weights.predicted == report.weights.measured == 2 * numel
        assert report.gradients.predicted == report.gradients.measured == 4 * numel
        wanted = (dense / 2 + expert) * state + norm / 2 * norm_state
        assert report.optimizer.predicted == wanted
        step = 8
        assert report.optimizer.measured == wanted + norm / 2 * norm_state + step
        assert report.total.measured == pytest.approx(report.total.predicted, rel=0.01)
        table = str(report)
        assert f"{numel} parameters" in table
        assert f"{4:8.3f} B" in table


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_predicted_in_the_dtype_they_are_added_in(alone, dtype):
    named = [("w", nn.Parameter(torch.ones(10, 10).bfloat16())), ("b", nn.Parameter(torch.ones(5)))]
    optimizer = ShardedAdamW(named, alone, lr=0.1)
    assert memory_report(named, alone, optimizer).gradients.predicted == 4 * 105
    reducer = GradientReducer(named, alone, accumulate_dtype=dtype)
    report = memory_report(named, alone, optimizer)
    assert report.gradients.predicted == report.gradients.measured == dtype.itemsize * 105
    assert f"{dtype.itemsize:8.3f} B" in str(report)
    reducer.close()
    again = memory_report(named, alone, optimizer).gradients
    assert (again.predicted, again.measured) == (4 * 105, 0)


def test_a_report_sees_what_is_kept_twice(alone):
    """A formula that always agrees proves nothing: FP32 weights are not BF16 ones."""
    named = [("w", nn.Parameter(torch.ones(100, 100)))]
    optimizer = ShardedAdamW(named, alone, lr=0.1)
    vars(named[0][1])["main_grad"] = torch.zeros(2, 100, 100)[0]
    report = memory_report(named, alone, optimizer)
    assert report.weights.measured == 4 * 10_000
    assert report.gradients.measured == 2 * report.gradients.predicted
