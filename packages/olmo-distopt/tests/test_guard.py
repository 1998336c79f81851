import math
import statistics
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_distopt import (
    GradientReducer,
    ReplicaGroups,
    ShardedAdamW,
    ShardedMuon,
    StepGuard,
    clip_factor,
    global_grad_norm,
)
from torch import nn

NAN, INF = math.nan, math.inf


def _spikes(history, value, window, least, limit):
    """The definition, over the finite values so far."""
    last = history[-window:]
    if len(last) < least:
        return False
    median = statistics.median_low(last)
    mad = statistics.median_low([abs(x - median) for x in last])
    return value > median + limit * max(1.4826 * mad, 0.01 * abs(median))


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(
        st.tuples(
            *[st.one_of(st.floats(-4, 4), st.sampled_from([NAN, INF, -INF, 30.0, 1e30, 2.0]))] * 2
        ),
        max_size=40,
    ),
    window=st.integers(2, 9),
    limit=st.sampled_from([1.0, 6.0, INF]),
    data=st.data(),
)
def test_verdicts_are_those_of_the_definition(pairs, window, limit, data):
    least = data.draw(st.integers(2, window))
    guard = StepGuard(window=window, least_history=least, limit=limit)
    seen: list[list[float]] = [[], []]
    counts = [0, 0, 0, 0]
    num_skipped = 0
    for pair in pairs:
        reasons = [not math.isfinite(value) for value in pair] + [
            math.isfinite(value) and _spikes(history, value, window, least, limit)
            for history, value in zip(seen, pair, strict=True)
        ]
        verdict = guard.check(*(torch.tensor(value, dtype=torch.float64) for value in pair))
        assert verdict.item() == any(reasons)
        assert (verdict.dtype, verdict.shape) == (torch.bool, ())
        counts = [count + reason for count, reason in zip(counts, reasons, strict=True)]
        num_skipped += any(reasons)
        for history, value in zip(seen, pair, strict=True):
            history.extend([value] if math.isfinite(value) else [])
    assert [int(count) for count in guard.num_by_reason.values()] == counts
    assert int(guard.num_skipped) == num_skipped


def test_a_spike_is_skipped_and_a_new_level_is_accepted_in_time():
    guard = StepGuard(window=8, least_history=4)
    number = torch.tensor

    def verdicts(losses):
        return [guard.check(number(loss), number(1.0)).item() for loss in losses]

    assert verdicts([2.0, 2.1, 1.9, 2.0]) == [False] * 4
    assert verdicts([9.0, 2.0, 1.0, -5.0, 2.05]) == [True, False, False, False, False]
    assert verdicts([4.0] * 12)[-1] is False
    assert {key: int(value) for key, value in guard.num_by_reason.items()}["norm spikes"] == 0


def test_a_hardly_moving_number_may_move_by_a_percent_times_the_limit():
    guard = StepGuard(window=4, least_history=2, limit=6.0)
    one = torch.tensor(1.0)
    for _ in range(4):
        assert not guard.check(one, one)
    assert not guard.check(one * 1.059, one)
    assert guard.check(one * 1.061, one)


def test_bad_options():
    with pytest.raises(ValueError, match="`window` must be >= 2, got 1"):
        StepGuard(window=1)
    for least in (1, 9):
        with pytest.raises(ValueError, match=rf"in \[2, `window`=8\], got {least}"):
            StepGuard(window=8, least_history=least)
    with pytest.raises(ValueError, match="`limit` must be > 0, got nan"):
        StepGuard(limit=NAN)
    with pytest.raises(ValueError, match=r"`norm` must be 0-d, got shape \(1,\)"):
        StepGuard().check(torch.tensor(1.0), torch.ones(1))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_state_travels_in_a_checkpoint(tmp_path):
    def filled(values):
        guard = StepGuard(window=4, least_history=2)
        for value in values:
            guard.check(torch.tensor(value), torch.tensor(1.0))
        return guard

    saved = filled([1.0, 1.1, NAN, 0.9])
    dcp.save(saved.state_dict(), checkpoint_id=tmp_path)
    loaded = filled([70.0, 80.0])
    dcp.load(loaded.state_dict(), checkpoint_id=tmp_path)
    for value in (1.05, 3.0, 1.0):
        value = torch.tensor(value)
        one = torch.tensor(1.0)
        assert saved.check(value, one).item() == loaded.check(value, one).item() == (value > 2)
    assert int(loaded.num_skipped) == 2


def _skips(rank, world, kind, poison):
    """Five windows, the third one bad on rank 1, and the same without the third."""
    make: Any = {"adamw": ShardedAdamW, "muon": ShardedMuon}[kind]
    groups = ReplicaGroups(
        {"dense": dist.group.WORLD, "expert": None}, lambda name, _: name.partition(".")[0]
    )

    def run(windows):
        torch.manual_seed(0)
        values = {"dense.a": (4, 6), "dense.b": (3,), f"expert.w{rank}": (2, 3, 4)}
        named: list[tuple[str, Any]] = [
            (name, nn.Parameter(torch.randn(shape))) for name, shape in values.items()
        ]
        reducer = GradientReducer(named, groups, overlap=True)
        optimizer = make(named, groups, lr=0.1, min_shard_numel=4)
        guard = StepGuard(window=4, least_history=2, limit=1e6)
        verdicts = []
        for window in windows:
            reducer.zero()
            before = everything(named, optimizer)
            for name, parameter in named:
                generator = torch.Generator().manual_seed(10 * window + len(name))
                grad = torch.randn(parameter.shape, generator=generator)
                if window == 2 and rank == 1 and name.startswith("expert"):
                    grad[1, 2, 3] = poison
                (parameter * grad).sum().backward()
            reducer.reduce()
            norm = global_grad_norm(named, groups)
            skip = guard.check(torch.tensor(1.0 + rank), norm)
            optimizer.step(grad_scale=clip_factor(norm, 0.5), skip=skip)
            verdicts.append(skip.item())
            unchanged = [same(before[k], v) for k, v in everything(named, optimizer).items()]
            assert all(unchanged) if skip else not any(unchanged)
        assert int(guard.num_skipped) == sum(verdicts)
        return verdicts, everything(named, optimizer)

    def everything(named, optimizer):
        state = {k: getattr(v, "local", v) for k, v in optimizer.state_dict().items()}
        state |= dict(named)
        return {key: value.detach().clone() for key, value in state.items() if value.numel()}

    def same(a, b):
        return torch.equal(a, b)

    verdicts, state = run(range(5))
    clean_verdicts, clean = run([0, 1, 3, 4])
    assert not any(clean_verdicts)
    assert all(same(clean[key], value) for key, value in state.items()), "as if it had not been"
    return verdicts


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("poison", [NAN, INF])
def test_a_bad_gradient_on_one_rank_is_skipped_by_all(processes, kind, poison):
    ranks = processes.run(_skips, kind, poison, world=2)
    assert ranks == [[False, False, True, False, False]] * 2


def _own_losses(rank, world):
    guard = StepGuard(window=4, least_history=2)
    losses = [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 9.0, NAN]][rank]
    verdicts = [guard.check(torch.tensor(x), torch.tensor(1.0)).item() for x in losses]
    return verdicts, {key: int(value) for key, value in guard.num_by_reason.items()}


@pytest.mark.dist
def test_losses_of_each_rank_give_one_verdict(processes):
    for verdicts, reasons in processes.run(_own_losses, world=2):
        assert verdicts == [False, False, True, True]
        assert reasons == {
            "loss not finite": 1,
            "norm not finite": 0,
            "loss spikes": 1,
            "norm spikes": 0,
        }
