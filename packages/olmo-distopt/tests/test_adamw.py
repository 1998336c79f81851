import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from olmo_distopt import (
    DecayPolicy,
    GradientReducer,
    Location,
    ReplicaGroups,
    ShardedAdamW,
    _adamw_update,
    decays_matrices,
    reference,
)
from torch import nn

# A failure restarts the worker processes, so the example found is kept and not shrunk.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
SHAPES = [(3, 5), (7,), (), (0, 4), (2, 3, 4), (1, 1)]


def _named(shapes, seed=0) -> list[tuple[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"p{i}", nn.Parameter(torch.randn(s, generator=generator))) for i, s in enumerate(shapes)
    ]


def _set_grads(named, seed):
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in named:
        grad = torch.randn(parameter.shape, generator=generator)
        vars(parameter)["main_grad"] = grad
        parameter.grad = grad.to(parameter.dtype)


def _torch_adamw(named, *, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1):
    """torch's optimizer with our rule of decay."""
    decayed = [p for name, p in named if decays_matrices(name, p)]
    others = [p for name, p in named if not decays_matrices(name, p)]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, foreach=False)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.999), (0.3, 0.0)])
def test_bitwise_equal_to_torch(alone, betas):
    ours, theirs = _named(SHAPES), _named(SHAPES)
    optimizer = ShardedAdamW(ours, alone, lr=0.01, betas=betas, eps=1e-6)
    oracle = _torch_adamw(theirs, lr=0.01, betas=betas, eps=1e-6)
    for step in range(5):
        _set_grads(ours, step)
        _set_grads(theirs, step)
        optimizer.step()
        oracle.step()
        for (name, mine), (_, other) in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other), f"{name} at step {step + 1}"


def test_the_reference_is_torch_in_float64():
    (_, weight), *_ = _named([(3, 4)])
    weight = nn.Parameter(weight.detach().double())
    oracle = torch.optim.AdamW([weight], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)
    mine, m, v = weight.detach().clone(), torch.zeros(3, 4).double(), torch.zeros(3, 4).double()
    for step in range(1, 6):
        weight.grad = torch.full_like(weight, 0.5).cos_() * step
        mine, m, v = reference.adamw(
            *(mine, weight.grad, m, v),
            **{"step": step, "lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2},
        )
        oracle.step()
        torch.testing.assert_close(mine, weight.detach(), rtol=1e-14, atol=1e-14)


def test_tiny_updates_survive_in_bf16(alone):
    weight = nn.Parameter(torch.ones(2, 2).bfloat16())
    optimizer = ShardedAdamW([("w", weight)], alone, lr=1e-4, weight_decay=0.0)
    vars(weight)["main_grad"] = torch.ones(2, 2)
    for _ in range(1000):
        optimizer.step()
    state: dict[str, Any] = optimizer.state_dict()
    main = state["main.w"].local
    # FP32 rounds each of 1000 weights near 1 by at most 2^-25.
    assert main.tolist() == pytest.approx([0.9] * 4, abs=1000 * 2.0**-25)
    assert torch.equal(weight, main.view(2, 2).bfloat16())
    assert optimizer.num_steps == 1000


def test_decay_by_name_and_shape(alone):
    decayed = {
        "embed.weight": (6, 2),
        "blocks.0.attention.q.weight": (2, 2),
        "blocks.1.experts.w_gate_up_E2HD": (2, 4, 2),
        "blocks.1.router.weight": (3, 2),
        "alone.weight": (2, 2),
    }
    kept = {
        "blocks.0.attention.q_norm.weight": (2, 3),
        "blocks.0.RMSNorm.weight": (4,),
        "blocks.1.experts.norm.weight": (2, 4),
        "blocks.1.experts.up_bias": (2, 4),
        "blocks.0.attention.q.bias": (2,),
        "ln_f.weight": (1, 4),
        "blocks.0.ln1.weight": (1, 4),
        "scale": (),
        "line": (4,),
    }
    named = [(name, nn.Parameter(torch.randn(shape))) for name, shape in (decayed | kept).items()]
    before = {name: parameter.detach().clone() for name, parameter in named}
    reducer = GradientReducer(named, alone)
    optimizer = ShardedAdamW(named, alone, lr=1.0, weight_decay=0.1)
    for _ in range(3):
        torch.stack([(parameter * 0.0).sum() for _, parameter in named]).sum().backward()
    reducer.reduce()
    optimizer.step()
    for name, parameter in named:
        factor = 0.9 if name in decayed else 1.0
        assert torch.equal(parameter, before[name] * factor), name


def test_a_decay_rule_of_your_own(alone):
    named = _named([(2, 2), (2, 2)])
    before = [parameter.detach().clone() for _, parameter in named]
    optimizer = ShardedAdamW(named, alone, lr=1.0, decay=lambda name, parameter: name == "p1")
    for _, parameter in named:
        vars(parameter)["main_grad"] = torch.zeros(2, 2)
    optimizer.step()
    assert torch.equal(named[0][1], before[0])
    assert torch.equal(named[1][1], before[1] * 0.9)


@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("routers", [False, True])
def test_decay_policy(embeddings, routers):
    policy = DecayPolicy(embeddings=embeddings, routers=routers)
    cases = {
        ("embedding.weight", (4, 2)): embeddings,
        ("model.embed_tokens.weight", (4, 2)): embeddings,
        ("wte.weight", (4, 2)): embeddings,
        ("unembed.weight", (4, 2)): True,
        ("lm_head.weight", (4, 2)): True,
        ("blocks.0.router.weight", (4, 2)): routers,
        ("blocks.0.router.weight", (8,)): routers,  # stored as a line
        ("layers.0.mlp.gate.weight", (4, 2)): routers,
        ("layers.0.mlp.gate_proj.weight", (4, 2)): True,
        ("blocks.0.router.bias", (4,)): False,
        ("blocks.0.router.temperature", (1,)): False,
        ("blocks.0.router.selection_bias.bias_E", (4,)): False,
        ("blocks.0.selection_bias.values", (4, 1)): False,
        ("blocks.0.router.norm.weight", (2, 2)): False,
        ("embedding.norm.weight", (2, 2)): False,
        ("blocks.0.experts.w_down_EDH", (2, 4, 2)): True,
        ("blocks.0.experts.biases", (2, 4)): False,
    }
    for (name, shape), expected in cases.items():
        assert policy(name, nn.Parameter(torch.ones(shape))) is expected, name


def test_rates_of_their_own_by_name(alone):
    """A factor of the learning rate and one of the decay, as two optimizers would apply them."""
    ours, theirs = _named([(2, 3), (2, 3), (4,)]), _named([(2, 3), (2, 3), (4,)])
    scales, decays = {"p0": 1.0, "p1": 0.25, "p2": 0.0}, {"p0": 0.5, "p1": 2.0, "p2": 1.0}
    optimizer = ShardedAdamW(
        ours,
        alone,
        lr=0.1,
        weight_decay=0.1,
        lr_scale=lambda name, _: scales[name],
        decay=lambda name, _: decays[name],
    )
    oracle = torch.optim.AdamW(
        [
            {"params": [p], "lr": 0.1 * scales[n], "weight_decay": 0.1 * decays[n]}
            for n, p in theirs
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
        foreach=False,
    )
    for step in range(4):
        _set_grads(ours, step)
        _set_grads(theirs, step)
        if step == 2:
            optimizer.lr /= 2
            for group in oracle.param_groups:
                group["lr"] /= 2
        optimizer.step()
        oracle.step()
    for (name, mine), (_, other) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-7, msg=name)
    assert torch.equal(ours[2][1], _named([(2, 3), (2, 3), (4,)])[2][1])


@given(
    numel=st.integers(1, 40),
    betas=st.sampled_from([(0.9, 0.95), (0.0, 0.99), (0.5, 0.0)]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=30, deadline=None)
def test_bf16_moments_are_the_rounded_ones(numel, betas, seed):
    def rounded(value):
        return value.float().bfloat16().double()

    draw = torch.Generator().manual_seed(seed)
    weight = nn.Parameter(torch.randn(numel, generator=draw))
    expected = [weight.detach().double(), *[torch.zeros(numel).double()] * 2]
    groups = ReplicaGroups({"alone": None}, lambda *_: "alone")
    optimizer = ShardedAdamW(
        *([("w", weight)], groups), lr=0.01, betas=betas, moment_dtype=torch.bfloat16
    )
    for step in range(4):
        grad = torch.randn(numel, generator=draw)
        vars(weight)["main_grad"] = grad
        optimizer.step()
        options = {"step": step + 1, "lr": 0.01, "betas": betas, "eps": 1e-8}
        new = reference.adamw(
            expected[0], grad.double(), *expected[1:], **options, weight_decay=0.0
        )
        expected = [new[0], rounded(new[1]), rounded(new[2])]
    state: dict[str, Any] = optimizer.state_dict()
    assert state["exp_avg.w"].dtype == state["exp_avg_sq.w"].dtype == torch.bfloat16
    # A moment on the edge between two BF16 numbers may fall to either: half a percent of a step.
    torch.testing.assert_close(weight.double(), expected[0], rtol=0, atol=4 * 0.01 * 2.0**-8)
    for kind, want in zip(("exp_avg", "exp_avg_sq"), expected[1:], strict=True):
        torch.testing.assert_close(state[f"{kind}.w"].local.double(), want, rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16])
def test_a_factor_and_a_verdict_on_the_device(alone, moment_dtype):
    """A scaled step is a step from scaled gradients; a skipped one never was."""
    ours, theirs = _named(SHAPES), _named(SHAPES)
    make = {"lr": 0.01, "moment_dtype": moment_dtype}
    guarded, plain = ShardedAdamW(ours, alone, **make), ShardedAdamW(theirs, alone, **make)
    for step in range(5):
        skipped = step in (0, 3)
        _set_grads(ours, step)
        _set_grads(theirs, step)
        if skipped:
            for _, parameter in ours:
                parameter.main_grad.fill_(math.nan)
        kept = [parameter.main_grad.clone() for _, parameter in ours]
        guarded.step(grad_scale=torch.tensor(0.25), skip=torch.tensor(skipped))
        for (_, parameter), before in zip(ours, kept, strict=True):
            torch.testing.assert_close(parameter.main_grad, before, rtol=0, atol=0, equal_nan=True)
        if not skipped:
            for _, parameter in theirs:
                parameter.main_grad *= 0.25
            plain.step()
    assert guarded.num_steps == plain.num_steps == 3
    want: dict[str, Any] = plain.state_dict()
    for key, value in guarded.state_dict().items():
        assert torch.equal(getattr(value, "local", value), getattr(want[key], "local", want[key]))
    for (name, mine), (_, other) in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other), name


def test_a_new_learning_rate_reaches_every_parameter(alone):
    ours, theirs = _named(SHAPES), _named(SHAPES)
    optimizer, oracle = ShardedAdamW(ours, alone, lr=0.5), _torch_adamw(theirs, lr=0.5)
    for step, lr in enumerate([0.5, 0.1, 0.1, 0.02]):
        _set_grads(ours, step)
        _set_grads(theirs, step)
        for group in oracle.param_groups:
            group["lr"] = lr
        oracle.step()
        if step == 1:
            optimizer.lr = lr
        optimizer.step(lr=lr if step == 3 else None)
        for (name, mine), (_, other) in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other), name
    assert optimizer.lr == 0.1, "`step(lr=...)` is for one step"


def test_frozen_parameters_have_no_state(alone):
    named = _named([(2, 2), (2, 2)])
    named[0][1].requires_grad_(False)
    optimizer = ShardedAdamW(named, alone, lr=1.0)
    assert set(optimizer.state_dict()) == {"step", "main.p1", "exp_avg.p1", "exp_avg_sq.p1"}


def test_adopting_parameters_starts_afresh(alone):
    named, others = _named([(2, 2)]), _named([(2, 2)], seed=1)
    optimizer = ShardedAdamW(named, alone, lr=0.1)
    _set_grads(named, 0)
    optimizer.step()
    with torch.no_grad():
        named[0][1].copy_(others[0][1])
    optimizer.adopt_parameters()
    fresh = ShardedAdamW(others, alone, lr=0.1)
    for pair in (named, others):
        _set_grads(pair, 1)
    optimizer.step()
    fresh.step()
    assert torch.equal(named[0][1], others[0][1])
    assert optimizer.num_steps == 1


def test_a_refused_step_changes_nothing(alone):
    named = _named([(2, 2), (3,)])
    optimizer = ShardedAdamW(named, alone, lr=0.1)
    vars(named[0][1])["main_grad"] = torch.ones(2, 2)
    before = [parameter.detach().clone() for _, parameter in named]
    with pytest.raises(ValueError, match="`p1` must have a `main_grad`"):
        optimizer.step()
    vars(named[1][1])["main_grad"] = torch.ones(4)
    with pytest.raises(ValueError, match=r"`main_grad` of `p1` .* \(3,\), got \(4,\)"):
        optimizer.step()
    vars(named[1][1])["main_grad"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"`lr` must be in \[0, inf\), got nan"):
        optimizer.step(lr=math.nan)
    for options, message in [
        ({"skip": torch.tensor(1)}, "`skip` must be bool, got torch.int64"),
        ({"skip": torch.tensor([True])}, r"`skip` must be 0-d, got shape \(1,\)"),
        ({"grad_scale": torch.ones(2)}, r"`grad_scale` must be 0-d, got shape \(2,\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            optimizer.step(**options)
    assert optimizer.num_steps == 0
    assert all(torch.equal(p, old) for (_, p), old in zip(named, before, strict=True))


def test_bad_options(alone):
    named = _named([(2, 2)])
    for options, message in [
        ({"lr": -1.0}, r"`lr` must be in \[0, inf\), got -1.0"),
        ({"betas": (1.0, 0.9)}, r"`betas\[0\]` must be in \[0, 1\), got 1.0"),
        ({"betas": (0.9, -0.1)}, r"`betas\[1\]` must be in \[0, 1\), got -0.1"),
        ({"eps": 0.0}, "`eps` must be > 0 and finite, got 0.0"),
        ({"weight_decay": math.inf}, r"`weight_decay` must be in \[0, inf\), got inf"),
        ({"bucket_bytes": -1}, "`bucket_bytes` must be > 0, got -1"),
        ({"lr_scale": lambda *_: -1.0}, r"`lr_scale\('p0'\)` must be in \[0, inf\), got -1.0"),
        ({"decay": lambda *_: math.nan}, r"`decay\('p0'\)` must be in \[0, inf\), got nan"),
        ({"moment_dtype": torch.float16}, "must be float32 or bfloat16, got torch.float16"),
        (
            {"moment_dtype": torch.bfloat16, "betas": (0.9, 0.999)},
            r"at most 1 - 2\^-8 with bfloat16 moments, got 0.999",
        ),
        ({"locations": {"q": Location((2,), 0)}}, r"must name listed parameters, got \['q'\]"),
        ({"locations": {"p0": Location((2, 3), 0)}}, r"`p0` must lie .* \(2, 2\) at row 0"),
        ({"locations": {"p0": Location((4, 2), 3)}}, "at row 3 of"),
    ]:
        with pytest.raises(ValueError, match=message):
            ShardedAdamW(named, alone, **({"lr": 0.1} | options))
    with pytest.raises(ValueError, match=r"at most 32 bits.*got torch.float64"):
        ShardedAdamW([("w", nn.Parameter(torch.ones(2).double()))], alone, lr=0.1)


def _step(rank, world, shapes, group_of, dtype, min_shard_numel, bucket_bytes):
    """Three steps on this rank's share of the gradients; returns weights and elements of state."""
    groups = ReplicaGroups(
        {"all": dist.group.WORLD, "own": None}, lambda name, _: group_of[int(name[1:])]
    )
    named: list[tuple[str, Any]] = [
        (name, nn.Parameter(p.detach().to(dtype))) for name, p in _named(shapes)
    ]
    reducer = GradientReducer(named, groups, bucket_bytes=bucket_bytes)
    optimizer = ShardedAdamW(
        named, groups, lr=0.01, min_shard_numel=min_shard_numel, bucket_bytes=bucket_bytes
    )
    empty = torch.empty

    def poisoned(*size, **options):
        tensor = empty(*size, **options)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    torch.empty = poisoned
    try:
        for step in range(3):
            for index, (_, parameter) in enumerate(named):
                if group_of[index] == "own" or (step + index) % world == rank:
                    grad = torch.full(parameter.shape, (step + 1) * 0.25 * (index + 1)).to(dtype)
                    (parameter * grad).sum().backward()
            reducer.reduce()
            optimizer.step()
            for _, parameter in named:
                parameter.main_grad.fill_(math.nan)
            reducer.zero()
    finally:
        torch.empty = empty
    state: dict[str, Any] = optimizer.state_dict()
    held = {key: value.local.numel() for key, value in state.items() if "." in key}
    return [parameter.detach() for _, parameter in named], held


@pytest.mark.dist
@settings(max_examples=10, deadline=None, phases=PHASES)
@given(
    world=st.integers(1, 4),
    shapes=st.lists(
        st.lists(st.integers(0, 6), min_size=0, max_size=3).map(tuple), min_size=1, max_size=6
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    min_shard_numel=st.sampled_from([0, 1, 6, 4096]),
    bucket_bytes=st.sampled_from([1, 40, 10**6]),
    data=st.data(),
)
def test_any_group_equals_one_process(
    processes, world, shapes, dtype, min_shard_numel, bucket_bytes, data
):
    group_of = [data.draw(st.sampled_from(["all", "own"])) for _ in shapes]
    arguments = (shapes, group_of, dtype, min_shard_numel, bucket_bytes)
    _compare_with_torch(processes, world, *arguments)


@settings(max_examples=4, deadline=None)
@given(
    world=st.integers(5, 7),
    sizes=st.lists(st.sampled_from([0, 1, 3, 8]), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bucket_bytes=st.sampled_from([1, 100, 10**6]),
    own=st.sets(st.integers(0, 4), max_size=2),
)
def test_groups_of_five_to_seven_equal_one_process(threads, world, sizes, dtype, bucket_bytes, own):
    shapes = [*((size, world) for size in sizes), (11,)]
    group_of = ["own" if index in own else "all" for index in range(len(shapes))]
    _compare_with_torch(threads, world, shapes, group_of, dtype, 6, bucket_bytes)


def _compare_with_torch(ranks, world, shapes, group_of, dtype, min_shard_numel, bucket_bytes):
    arguments = (shapes, group_of, dtype, min_shard_numel, bucket_bytes)
    results = ranks.run(_step, *arguments, world=world)
    named = [(name, nn.Parameter(p.detach().to(dtype).float())) for name, p in _named(shapes)]
    oracle = _torch_adamw(named, lr=0.01)
    for step in range(3):
        for index, (_, parameter) in enumerate(named):
            parameter.grad = torch.full_like(parameter, (step + 1) * 0.25 * (index + 1))
        oracle.step()
    for weights, held in results:
        for index, (weight, (name, expected)) in enumerate(zip(weights, named, strict=True)):
            assert torch.equal(weight, expected.detach().to(dtype)), f"{name} {tuple(weight.shape)}"
            numel = weight.numel()
            cut = group_of[index] == "all" and numel % world == 0 and numel >= min_shard_numel
            for kind in ("main", "exp_avg", "exp_avg_sq"):
                assert held[f"{kind}.{name}"] == (numel // world if cut else numel)


@settings(max_examples=30, deadline=None)
@given(
    numels=st.lists(st.sampled_from([0, 1, 3, 8, 9, 31, 64, 100]), min_size=1, max_size=12),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16]), min_size=1, max_size=3),
    moment_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    small=st.sampled_from([1, 9, 64, 1000]),
    together=st.sampled_from([100, 150, 10_000]),
    guarded=st.booleans(),
)
def test_small_tensors_together_get_the_bits_of_each_alone(
    numels, dtypes, moment_dtype, small, together, guarded
):
    """Whatever is small, and however many elements go together; also where a step is skipped."""
    groups = ReplicaGroups({"alone": None}, lambda *_: "alone")

    def train(limits):
        generator = torch.Generator().manual_seed(0)
        named = [
            (f"p{i}", nn.Parameter(torch.randn(n, generator=generator).to(dtypes[i % len(dtypes)])))
            for i, n in enumerate(numels)
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_adamw_update, "_SMALL_NUMEL", limits[0])
            patch.setattr(_adamw_update, "_TOGETHER_NUMEL", limits[1])
            optimizer = ShardedAdamW(
                *(named, groups),
                lr=0.01,
                decay=lambda name, _: int(name[1:]) % 2,
                moment_dtype=moment_dtype,
            )
            for step in range(3):
                for i, (_, parameter) in enumerate(named):
                    grad = torch.randn(parameter.shape, generator=generator)
                    wide = torch.float64 if i % 5 == 4 else torch.float32
                    vars(parameter)["main_grad"] = grad.to(wide)
                skip = torch.tensor(step == 1) if guarded else None
                optimizer.step(grad_scale=torch.tensor(0.7), skip=skip)
        state: dict[str, Any] = optimizer.state_dict()
        tensors = {key: getattr(value, "local", value) for key, value in state.items()}
        lots = [len(lot) for lots in (optimizer._adamw._plain or {}).values() for lot in lots]
        return tensors | {name: parameter.detach() for name, parameter in named}, lots

    alone, singles = train((0, 1))
    joined, lots = train((small, together))
    assert set(singles) <= {1}
    assert sum(lots) == sum(singles)
    for key, value in alone.items():
        assert torch.equal(joined[key], value), key


def test_a_hundred_small_tensors_are_one_lot(alone):
    named = _named([(64,)] * 100)
    _set_grads(named, 0)
    optimizer = ShardedAdamW(named, alone, lr=0.1)
    optimizer.step()
    ((lot,),) = (optimizer._adamw._plain or {}).values()
    assert len(lot) == 100
