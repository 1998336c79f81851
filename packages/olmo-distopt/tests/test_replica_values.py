"""Replicas must start with the same bits, and every member hears of it when they do not."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_distopt import ReplicaGroups, ShardedAdamW, _checksum
from olmo_distopt._checksum import checksum
from torch import nn

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 4, 13])
def test_the_checksum_is_its_equation(monkeypatch, dtype, numel):
    monkeypatch.setattr(_checksum, "_CHUNK", 3)
    values = torch.randn(numel).to(dtype)
    total = 0
    keys = [int(key) for key in _checksum._keys(3, torch.device("cpu"))]
    assert all(key % 2 for key in keys)
    num_chunks = (numel + 2) // 3
    for i, bits in enumerate(values.view(INTEGERS[dtype.itemsize]).tolist()):
        total += bits * keys[i % 3] * _checksum._CHUNK_FACTOR ** (num_chunks - 1 - i // 3)
    assert int(checksum(values)) % 2**64 == total % 2**64


@settings(max_examples=30, deadline=None)
@given(
    numel=st.integers(2, 300),
    dtype=st.sampled_from(DTYPES),
    chunk=st.sampled_from([1, 2, 64, 2**20]),
    seed=st.integers(0, 2**31),
)
def test_any_other_bits_have_another_checksum(numel, dtype, chunk, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator).to(dtype)
    bits = values.view(INTEGERS[dtype.itemsize])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_checksum, "_CHUNK", chunk)
        want = int(checksum(values))
        assert int(checksum(values.clone())) == want
        one = bits.clone()
        one[random.Random(seed).randrange(numel)] ^= 1 << random.Random(seed).randrange(7)
        others = {
            "one bit": one,
            "another draw": torch.randn(numel, generator=generator).to(dtype).view(bits.dtype),
            "reversed": bits.flip(0),
            "rolled": bits.roll(1),
            "negated": (-values.float()).to(dtype).view(bits.dtype),
        }
        for name, other in others.items():
            if not torch.equal(other, bits):
                assert int(checksum(other)) != want, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 2, 64, 4096, 2**20, 2**21])
def test_constant_tensors_have_different_checksums(dtype, numel):
    constants = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, torch.inf, torch.nan]
    sums = {int(checksum(torch.full((numel,), value, dtype=dtype))) for value in constants}
    assert len(sums) == len(constants)


# Above and below `min_shard_numel`, divisible by the number of replicas and not, 0-d and empty.
SHAPES = {"big": (64, 66), "odd": (4097,), "small": (6, 5), "scalar": (), "empty": (0, 3)}
DIFFERENT_SEEDS = ["big", "odd", "small", "scalar"]


def _model(seed, dtype):
    torch.manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in SHAPES.items()}


def _message(named, groups):
    try:
        ShardedAdamW(named.items(), groups, lr=0.1)
    except ValueError as error:
        return str(error)
    return ""


def _starts(rank, world):
    """Return the message of every start of this rank, by case; no message, no error."""
    pair: Any = dist.new_group([0, 2])
    everyone = ReplicaGroups({"all": dist.group.WORLD}, lambda name, _: "all")
    alone = ReplicaGroups({"own": None}, lambda name, _: "own")
    messages = {}
    for dtype in (torch.float32, torch.bfloat16):
        messages["same seed", dtype] = _message(_model(0, dtype), everyone)
        messages["seed of the rank", dtype] = _message(_model(rank, dtype), everyone)
        messages["own", dtype] = _message(_model(rank, dtype), alone)
        for name in DIFFERENT_SEEDS:
            model = _model(0, dtype)
            if rank == world - 1:
                last = model[name].detach().view(-1)[-1:].view(INTEGERS[dtype.itemsize])
                last ^= 1
            messages[f"last bit of {name}", dtype] = _message(model, everyone)
    many = {f"p{i}": nn.Parameter(torch.full((2, 2), float(rank))) for i in range(7)}
    messages["many"] = _message(many, everyone)
    two = {"pair.w": nn.Parameter(torch.full((3,), float(rank)))} if rank != 1 else {}
    two["all.w"] = nn.Parameter(torch.ones(3))
    groups: Any = {"pair": pair, "all": dist.group.WORLD}
    messages["one group of two"] = _message(two, ReplicaGroups(groups, lambda name, _: name[:-2]))
    return messages


def _adopt(rank, world):
    """Weights that came without state, equal and not, into an optimizer that was sound."""
    groups = ReplicaGroups({"all": dist.group.WORLD}, lambda name, _: "all")
    model = _model(0, torch.bfloat16)
    optimizer = ShardedAdamW(model.items(), groups, lr=0.1)
    state: dict[str, Any] = optimizer.state_dict()
    before = {key: getattr(value, "local", value).clone() for key, value in state.items()}
    with torch.no_grad():
        model["small"].fill_(rank)
    with pytest.raises(ValueError, match="differ in 1 of 5 parameters: `small`"):
        optimizer.adopt_parameters()
    for key, value in before.items():
        assert torch.equal(getattr(state[key], "local", state[key]), value), key
    with torch.no_grad():
        model["small"].fill_(7)
    optimizer.adopt_parameters()
    assert (state["main.small"].local == 7).all()


@pytest.mark.dist
def test_unequal_replicas_are_refused_on_every_member(processes):
    ranks = processes.run(_starts, world=3)
    for rank, messages in enumerate(ranks):
        for dtype in (torch.float32, torch.bfloat16):
            assert messages["same seed", dtype] == ""
            assert messages["own", dtype] == ""
            assert messages["seed of the rank", dtype] == (
                "All 3 members of the replica group `all` must hold the same values, but they "
                "differ in 4 of 5 parameters: `big`, `odd`, `small`, `scalar`. Initialise the "
                "replicas from the same seed, or broadcast the parameters from one member to the "
                "others first."
            )
            for name in DIFFERENT_SEEDS:
                message = messages[f"last bit of {name}", dtype]
                assert f"differ in 1 of 5 parameters: `{name}`." in message
        assert "in 7 of 7 parameters: `p0`, `p1`, `p2`, `p3`, `p4` and 2 more." in messages["many"]
        wanted = "" if rank == 1 else "All 2 members of the replica group `pair` must"
        assert messages["one group of two"][: len(wanted) or None] == wanted
    processes.run(_adopt, world=2)
