import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from olmo_distopt import GradientReducer, ReplicaGroups, ShardedAdamW
from torch import nn


def test_alone_is_a_group_of_one(alone, parameter):
    group = alone.of("weight", parameter([1.0]))
    assert (group.name, group.process_group, group.size, group.rank) == ("alone", None, 1, 0)


def test_an_unknown_group_is_named_with_the_known_ones(parameter):
    groups = ReplicaGroups({"dense": None, "expert": None}, lambda name, parameter: "exprt")
    message = r"Parameter `w` is assigned to the replica group `exprt`.*`dense`, `expert`"
    with pytest.raises(ValueError, match=message):
        groups.of("w", parameter([1.0]))
    with pytest.raises(ValueError, match=message):
        ShardedAdamW([("w", parameter([1.0]))], groups, lr=0.1)


def test_the_assignment_sees_name_and_parameter(parameter):
    groups = ReplicaGroups(
        {"dense": None, "expert": None},
        lambda name, parameter: "expert" if parameter.ndim == 3 or "experts" in name else "dense",
    )
    assert groups.of("experts.bias", parameter([1.0])).name == "expert"
    assert groups.of("x", parameter([[[1.0]]])).name == "expert"
    assert groups.of("x", parameter([1.0])).name == "dense"


def _membership(rank, world):
    pair: Any = dist.new_group([0, 2])
    groups = ReplicaGroups({"pair": pair, "world": dist.group.WORLD}, lambda name, _: name)
    answer = groups.of("world", nn.Parameter(torch.ones(1)))
    assert (answer.size, answer.rank) == (world, rank)
    try:
        member = groups.of("pair", nn.Parameter(torch.ones(1)))
    except ValueError as error:
        return str(error)
    return (member.size, member.rank)


def _disagreement(rank, world):
    """Differences in names, shapes, dtypes, order, and a rank that lacks the group's parameters."""
    groups = ReplicaGroups({"all": dist.group.WORLD}, lambda name, _: "all")
    one, two = ("a", torch.ones(2)), ("b", torch.ones(3))
    odd = [
        [("a", torch.ones(2)), ("c", torch.ones(3))],
        [("a", torch.ones(2)), ("b", torch.ones(4))],
        [("a", torch.ones(2)), ("b", torch.ones(3).bfloat16())],
        [("b", torch.ones(3)), ("a", torch.ones(2))],
        [("a", torch.ones(2))],
        [],
    ]
    messages = []
    for different in odd:
        mine = different if rank == 1 else [one, two]
        try:
            GradientReducer([(name, nn.Parameter(value)) for name, value in mine], groups)
        except ValueError as error:
            messages.append(str(error))
    return messages


def _opposite_order(rank, world):
    """The groups come in opposite orders, and their parameters interleave differently."""
    names = ["dense", "expert"] if rank == 0 else ["expert", "dense"]
    made: dict[str, Any] = {name: dist.new_group([0, 1]) for name in ["dense", "expert"]}
    groups = ReplicaGroups({name: made[name] for name in names}, lambda name, _: name[:-1])
    weights: dict[str, Any] = {name: nn.Parameter(torch.ones(5)) for name in ["dense0", "dense1"]}
    weights |= {name: nn.Parameter(torch.ones(3)) for name in ["expert0", "expert1"]}
    order = [["dense0", "expert0", "dense1", "expert1"], ["expert0", "expert1", "dense0", "dense1"]]
    listed = [(name, weights[name]) for name in order[rank]]
    reducer = GradientReducer(listed, groups, bucket_bytes=16)
    for index, name in enumerate(sorted(weights)):
        (weights[name].sum() * 10**index * (rank + 1)).backward()
    reducer.reduce()
    return [weights[name].main_grad[0].item() for name in sorted(weights)]


@pytest.mark.dist
def test_membership_agreement_and_order(processes):
    members = processes.run(_membership, world=3)
    assert members[0] == (2, 0)
    assert "`pair`, but this process is not a member" in members[1]
    assert members[2] == (2, 1)

    for rank, messages in enumerate(processes.run(_disagreement, world=3)):
        assert len(messages) == 6, f"rank {rank} saw no difference in some list"
        assert all("members [1] differ from member 0" in message for message in messages)

    assert processes.run(_opposite_order, world=2) == [[3.0, 30.0, 300.0, 3000.0]] * 2


def _warnings(rank, world):
    """The messages of building a reducer and an optimizer over all kinds of groups."""
    alone: Any = [dist.new_group([each]) for each in range(world)][rank]
    pair: Any = dist.new_group([0, 1])
    said = []
    for groups in (
        {"all": None},
        {"all": None, "other": None},
        {"all": alone},
        {"all": None, "other": pair},
        {"all": dist.group.WORLD},
    ):
        replica_groups = ReplicaGroups(groups, lambda *_: "all")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            named = [("w", nn.Parameter(torch.ones(2)))]
            GradientReducer(named, replica_groups)
            ShardedAdamW(named, replica_groups, lr=0.1)
        said.append([str(each.message) for each in caught if "replica group" in str(each.message)])
        files = {Path(each.filename).name for each in caught if "replica" in str(each.message)}
        assert files <= {"test_groups.py", "_adamw.py"}, f"the warning points at {files}"
    return said


@pytest.mark.dist
def test_processes_that_are_told_of_no_replicas_are_warned(processes):
    """The group None of the examples, or WORLD from before the start, sums nothing in silence."""
    for none, nones, *others in processes.run(_warnings, world=3):
        for messages in (none, nones):
            assert len(messages) == 2
            assert "joins 3 processes, but every replica group is None" in messages[0]
        assert others == [[], [], []]
