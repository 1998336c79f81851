"""What one rank is refused for, and what ranks disagree in, all members hear: none is left waiting.

Every case ends with a step of all ranks, which would hang or differ had a collective been left out.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from olmo_distopt import (
    GradientReducer,
    Location,
    ReplicaGroups,
    ShardedAdamW,
    ShardedMuon,
    StepGuard,
    global_grad_norm,
)
from torch import nn

BAD = 1
"""The rank that does what the others do not."""


def _named():
    shapes = {"w": (2, 4), "line": (8,), "odd": (3,)}
    return [(name, nn.Parameter(torch.ones(shape))) for name, shape in shapes.items()]


def _with_grad():
    named = _named()
    named[0][1].grad = torch.ones(2, 4)
    return named


def _reducer(groups, named=None, **options):
    GradientReducer(_named() if named is None else named, groups, **options)


def _adamw(groups, named=None, make: Any = ShardedAdamW, **options):
    make(_named() if named is None else named, groups, **{"lr": 0.1, **options})


# Of the bad rank alone: how it is made, and what it hears itself; the others hear that it did.
REFUSED = {
    "a gradient": (_reducer, lambda: {"named": _with_grad()}, "`w` must hold no gradient yet"),
    "no collective": (_reducer, lambda: {"collective": "sum"}, "`collective` must be one of"),
    "no bytes": (_reducer, lambda: {"bucket_bytes": 0}, "`bucket_bytes` must be > 0"),
    "no names": (_reducer, lambda: {"named": [1]}, "must list (name, parameter)"),
    "no rate": (_adamw, lambda: {"lr": -1.0}, "`lr` must be in"),
    "a tensor": (_adamw, lambda: {"lr": torch.tensor(0.1)}, "`lr` must be a number"),
    "no betas": (_adamw, lambda: {"betas": (0.9,)}, "`betas` must be two numbers"),
    "no rule": (_adamw, lambda: {"decay": 0.1}, "`decay` must be a function"),
    "a rule that raises": (_adamw, lambda: {"decay": lambda *_: {}["x"]}, "x"),
    "a place outside": (
        _adamw,
        lambda: {"locations": {"w": Location((2, 4), 1)}},
        "rows of `w` must lie within",
    ),
    "no values": (
        _adamw,
        lambda: {"named": [("w", nn.Parameter(torch.ones(2, 4, device="meta")))]},
        "`w` must hold values, but it is on the meta device",
    ),
    "no scale": (_adamw, lambda: {"make": ShardedMuon, "scale": "x"}, "`scale` must be one of"),
    "no matrix": (
        _adamw,
        lambda: {"make": ShardedMuon, "matrices": lambda *_: True},
        "`line` must be a matrix",
    ),
}
# The good ranks' options, the bad one's, and what all of them hear.
DIFFERENT = {
    "bytes": (_reducer, {"bucket_bytes": 64}, {}, "`bucket_bytes` must be the same on all"),
    "collective": (
        _reducer,
        *({"collective": "reduce_scatter"}, {}),
        "got 'reduce_scatter' on member 0 and 'all_reduce' on member 1",
    ),
    "cut": (_adamw, {"min_shard_numel": 4}, {"min_shard_numel": 1}, "got 4 on member 0 and 1 on"),
    "rate": (_adamw, {}, {"lr": 0.2}, "`lr` must be the same on all members"),
    "betas": (_adamw, {}, {"betas": (0.9, 0.9)}, "`betas` must be the same"),
    "moments": (_adamw, {}, {"moment_dtype": torch.bfloat16}, "`moment_dtype` must be the same"),
    "decay": (_adamw, {}, {"decay": lambda *_: 1.0}, "members [1] differ from member 0"),
    "lr_scale": (_adamw, {}, {"lr_scale": lambda *_: 0.5}, "members [1] differ from member 0"),
    "location": (
        _adamw,
        {"locations": {"w": Location((4, 4), 0)}},
        {"locations": {"w": Location((4, 4), 2)}},
        "members [1] differ from member 0",
    ),
    "kind": (_adamw, {}, {"make": ShardedMuon}, "`optimizer` must be the same"),
    "matrices": (
        _adamw,
        {"make": ShardedMuon},
        {"make": ShardedMuon, "matrices": lambda *_: False},
        "members [1] differ from member 0",
    ),
}


def _message(make, groups, options):
    try:
        make(groups, **options)
    except Exception as error:
        return str(error)
    return ""


def _step_together(rank, groups):
    named = _named()
    reducer = GradientReducer(named, groups)
    optimizer = ShardedAdamW(named, groups, lr=0.1, min_shard_numel=1)
    torch.stack([parameter.sum() * (rank + 1) for _, parameter in named]).sum().backward()
    reducer.reduce()
    optimizer.step()
    return named[0][1].main_grad[0, 0].item()


def _refused(rank, world):
    groups = ReplicaGroups({"all": dist.group.WORLD}, lambda *_: "all")
    heard = {}
    for case, (make, options, _) in REFUSED.items():
        heard[case] = _message(make, groups, options() if rank == BAD else {})
    for case, (make, good, bad, _) in DIFFERENT.items():
        heard[case] = _message(make, groups, bad if rank == BAD else good)
    return heard, _step_together(rank, groups)


@pytest.mark.dist
def test_all_members_hear_what_one_is_refused_for(processes):
    for rank, (heard, total) in enumerate(processes.run(_refused, world=3)):
        for case, (_, _, message) in REFUSED.items():
            assert message in heard[case], (case, rank, heard[case])
            prefix = f"Member {BAD} of the replica group `all` was refused: "
            assert heard[case].startswith(prefix) == (rank != BAD), (case, rank)
        for case, (_, _, _, message) in DIFFERENT.items():
            assert message in heard[case], (case, rank, heard[case])
        assert total == 6.0


def _chained(rank, world, bad):
    """Groups {0, 1} and {1, 2}: the bad rank and the one at the other end share none."""
    first, second = (dist.new_group(pair) for pair in ([0, 1], [1, 2]))
    members: dict[str, Any] = {"first": first, "second": second}
    groups = ReplicaGroups(members, lambda name, _: name)
    named = [
        (name, nn.Parameter(torch.ones(4)))
        for name, ranks in (("first", (0, 1)), ("second", (1, 2)))
        if rank in ranks
    ]
    options = {"lr": -1.0} if rank == bad else {}
    message = _message(_adamw, groups, {"named": named, **options})
    GradientReducer(named, groups).reduce()
    return message


def _unknown_group(rank, world):
    """One rank's rule names a group that is not there, or one that it is no member of."""
    pair: Any = dist.new_group([0, 2])
    answers = []
    for name in ("al", "pair"):
        groups = ReplicaGroups(
            {"all": dist.group.WORLD, "pair": pair},
            lambda *_, name=name: name if rank == BAD else "all",
        )
        answers += [_message(make, groups, {}) for make in (_reducer, _adamw)]
    names = ReplicaGroups({"a" if rank == BAD else "b": dist.group.WORLD}, lambda *_: "b")
    answers.append(_message(_reducer, names, {}))
    both = ReplicaGroups({str(rank): dist.group.WORLD}, lambda *_: str(rank))
    answers.append(_message(_reducer, both, {}))
    everyone = ReplicaGroups({"all": dist.group.WORLD}, lambda *_: "all")
    return answers, _step_together(rank, everyone)


@pytest.mark.dist
def test_groups_that_share_a_member_hear_of_each_other(processes):
    for bad in (0, 2):
        for rank, message in enumerate(processes.run(_chained, bad, world=3)):
            assert "`lr` must be in [0, inf), got -1.0" in message, (bad, rank, message)
    for answers, total in processes.run(_unknown_group, world=3):
        assert "`al`, which must be one of the known groups" in answers[0]
        assert "`al`, which must be one of the known groups" in answers[1]
        assert "`pair`, but this process is not a member" in answers[2]
        assert "`pair`, but this process is not a member" in answers[3]
        assert "known groups: `a`" in answers[4]
        assert "must give it the same name, got ['0', '1', '2']" in answers[5]
        assert total == 6.0


def _spoiled(rank, world, overlap, collective):
    """NaN on one rank, gradients on one alone, unequal numbers of backwards, none at all."""
    groups = ReplicaGroups({"all": dist.group.WORLD}, lambda *_: "all")
    named = _named()
    reducer = GradientReducer(
        named, groups, overlap=overlap, collective=collective, min_shard_numel=1
    )
    optimizer = ShardedAdamW(named, groups, lr=0.1, min_shard_numel=1)
    guard = StepGuard()
    seen = []
    for case in ("nan", "one rank", "unequal", "none", "sound"):
        reducer.zero()
        num_backwards = {"one rank": int(rank == BAD), "unequal": rank, "none": 0}.get(case, 1)
        factor = float("nan") if case == "nan" and rank == BAD else 1.0
        for index in range(num_backwards):
            terms = torch.stack([parameter.sum() for _, parameter in named])
            if index < num_backwards - 1:
                with reducer.no_sync():
                    (terms.sum() * factor).backward()
            else:
                (terms.sum() * factor).backward()
        reducer.reduce(num_tokens=num_backwards)
        norm = global_grad_norm(named, groups)
        before = [parameter.detach().clone() for _, parameter in named]
        optimizer.step(skip=guard.check(torch.tensor(1.0), norm))
        moved = [not torch.equal(a, b) for a, (_, b) in zip(before, named, strict=True)]
        seen.append((case, norm.item(), any(moved), [p.tolist() for _, p in named]))
    return seen, optimizer.num_steps


@pytest.mark.dist
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_goes_wrong_on_one_rank_is_the_same_on_all(processes, overlap, collective):
    results = processes.run(_spoiled, overlap, collective, world=2)
    (first, num_steps), *others = results
    for seen, steps in others:
        assert repr(seen) == repr(first)
        assert steps == num_steps == 4
    moved = {case: (norm, moves) for case, norm, moves, _ in first}
    assert repr(moved["nan"][0]) == "nan"
    assert [moved[case][1] for case in ("nan", "one rank", "sound")] == [False, True, True]
    ones = (8 + 8 + 3) ** 0.5  # 19 elements, each of the mean gradient 1
    for case in ("one rank", "unequal", "sound"):
        assert moved[case][0] == pytest.approx(ones)
    assert moved["none"][0] == 0.0
