"""Parameters put together after a step: at once, or while the next forward already runs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from olmo_distopt import GradientReducer, ReplicaGroups, ShardedAdamW, ShardedMuon
from torch import nn

STEPS = 5
MAKERS = {"adamw": ShardedAdamW, "muon": ShardedMuon}


class _Block(nn.Module):
    """Reads its submodule's weight without calling it, as fused layers do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(torch.tanh(x @ self.inner.weight.T + self.inner.bias)) + x


class _Model(nn.Module):
    """Registered in another order than the one of use."""

    def __init__(self):
        super().__init__()
        self.last = _Block()
        self.head = nn.Linear(4, 4, bias=False)
        self.first = _Block()

    def forward(self, x):
        return self.head(self.last(self.first(x)))


def _train(rank, world, kind, overlap, bucket_bytes, after_rebuild=None):
    torch.manual_seed(0)
    model = _Model().bfloat16()
    groups = ReplicaGroups({"all": dist.group.WORLD}, lambda *_: "all")
    reducer = GradientReducer(
        model.named_parameters(), groups, overlap=overlap, bucket_bytes=bucket_bytes
    )
    optimizer = MAKERS[kind](
        model.named_parameters(),
        groups,
        lr=0.1,
        min_shard_numel=4,
        bucket_bytes=bucket_bytes,
        after_rebuild=after_rebuild and (lambda pairs: after_rebuild(model, pairs)),
    )
    if overlap:
        optimizer.overlap_gather([model.first, model.last])
    seen = []
    for step in range(STEPS):
        for microbatch in range(3):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step + 10 * rank))
            with reducer.no_sync() if microbatch < 2 else torch.enable_grad():
                loss = model((x + microbatch).bfloat16()).float().square().sum()
                loss.backward()
            seen.append(loss.item())
        reducer.reduce()
        optimizer.step()
        for parameter in model.parameters():
            parameter.main_grad.fill_(float("nan"))
        reducer.zero()
    optimizer.wait()
    state = {k: getattr(v, "local", v).clone() for k, v in optimizer.state_dict().items()}
    return seen, state | {name: p.detach() for name, p in model.named_parameters()}


def _on_and_off(rank, world, kind):
    differing = []
    for bucket_bytes in (1, 60, 10**6):
        (losses, plain), (others, overlapped) = (
            _train(rank, world, kind, overlap, bucket_bytes) for overlap in (False, True)
        )
        assert losses == others
        differing += [key for key in plain if not torch.equal(plain[key], overlapped[key])]
    return differing


@pytest.mark.dist
@pytest.mark.parametrize("kind", MAKERS)
def test_overlap_on_and_off_have_the_same_bits(processes, kind):
    """Reductions within backward and gathers within forward; 5 steps, accumulation 3."""
    assert processes.run(_on_and_off, kind, world=2) == [[], []]


def _pending(rank, world):
    """What is whole when: `a` and `b` share one staged gather, `c` is under no unit."""
    groups = ReplicaGroups({"all": dist.group.WORLD}, lambda *_: "all")
    unit, free = nn.Module(), nn.Module()
    unit.a, unit.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    free.c = nn.Parameter(torch.zeros(6))
    unit.forward = lambda: unit.a.detach().clone()
    named = [("a", unit.a), ("b", unit.b), ("c", free.c)]
    optimizer = ShardedAdamW(
        named, groups, lr=1.0, weight_decay=0.0, min_shard_numel=1, bucket_bytes=32
    )
    optimizer.overlap_gather([unit])
    for _, parameter in named:
        parameter.main_grad = torch.ones_like(parameter)
    own, other = (rank * 2, (1 - rank) * 2)
    observed = []
    for read in (unit, lambda: optimizer.wait() or unit.a.detach().clone()):
        before = unit.a.detach().clone()
        optimizer.step()
        # Its own half is there at once, the other's has yet to be copied in.
        observed.append((unit.a[own] != before[own]).item())
        observed.append((unit.a[other] == before[other]).item())
        observed.append((free.c == free.c[0]).all().item() and free.c[0].item() < 0)
        after = read()
        observed.append((after == after[0]).all().item() and torch.equal(unit.b, after))
    optimizer.step()
    optimizer.start_loading()
    observed.append((unit.a == unit.a[0]).all().item())
    return observed


@pytest.mark.dist
def test_a_forward_waits_for_its_own_parameters(processes):
    for observed in processes.run(_pending, world=2):
        assert observed == [True] * 9


def _derived(rank, world, kind, overlap):
    """A copy of every parameter, made in the callback; after the last wait it is the parameter."""
    copies: dict[str, torch.Tensor] = {}
    times: dict[str, int] = {}

    def rebuild(model, pairs):
        own = dict(model.named_parameters())
        for name, parameter in pairs:
            assert parameter is own[name]
            copies[name] = parameter.detach().clone()
            times[name] = times.get(name, 0) + 1

    _, final = _train(rank, world, kind, overlap, 60, after_rebuild=rebuild)
    assert set(copies) == {key for key in final if "." in key and not _is_state(key)}
    return (
        [name for name, copy in copies.items() if not torch.equal(copy, final[name])],
        set(times.values()),
    )


def _is_state(key):
    return key.partition(".")[0] in ("main", "exp_avg", "exp_avg_sq", "momentum")


@pytest.mark.dist
@pytest.mark.parametrize("overlap", [False, True])
def test_derived_weights_follow_every_parameter_once_a_step(processes, overlap):
    for kind in MAKERS:
        assert processes.run(_derived, kind, overlap, world=2) == [([], {STEPS})] * 2


def test_derived_weights_follow_a_load(alone):
    weight = nn.Parameter(torch.zeros(4))
    copies: list[Any] = []
    optimizer = ShardedAdamW([("w", weight)], alone, lr=0.1, after_rebuild=copies.extend)
    for value in optimizer.start_loading().values():
        getattr(value, "local", value).fill_(1)
    assert not copies
    optimizer.finish_loading()
    assert copies == [("w", weight)]
    assert (weight == 1).all()


def _mixed(rank, world):
    """A model that is cast in part after its optimizer was made: nothing passes through BF16."""
    groups = ReplicaGroups({"all": dist.group.WORLD}, lambda *_: "all")
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1 / 3)
    optimizer = ShardedAdamW(
        model.named_parameters(), groups, lr=0.0, min_shard_numel=1, weight_decay=0.0
    )
    model["a"].bfloat16()
    for parameter in model.parameters():
        parameter.main_grad = torch.ones(4, 4)
        with torch.no_grad():
            parameter.zero_()
    optimizer.step()
    a, b = (model[name].weight.detach() for name in "ab")
    assert a.dtype == torch.bfloat16
    return torch.equal(a, torch.full((4, 4), 1 / 3).bfloat16()) and torch.equal(
        b, torch.full((4, 4), 1 / 3)
    )


@pytest.mark.dist
def test_a_model_cast_after_its_optimizer_was_made(processes):
    assert processes.run(_mixed, world=2) == [True, True]
