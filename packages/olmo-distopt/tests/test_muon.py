import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from olmo_distopt import ReplicaGroups, ShardedAdamW, ShardedMuon, is_hidden_matrix, reference
from olmo_distopt._newton_schulz import orthogonalize, scale_to_unit
from torch import nn

# A failure restarts the worker processes, so the example found is kept and not shrunk.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
STEPS = 4
# Newton-Schulz multiplies a small singular value, and the rounding in its direction, by 3.4445 an
# iteration: 485 FP32 roundings of 6e-8, and some products' worth of them.
FP32_TOLERANCE = 1e-4


def _draw(shape, seed) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _named(shapes) -> list[tuple[str, Any]]:
    return [(f"p{i}", nn.Parameter(_draw(shape, i))) for i, shape in enumerate(shapes)]


def _all_matrices(name, parameter):
    return parameter.ndim >= 2


def _oracle(shape, index, steps, *, scale="adamw_rms", momentum=0.95, nesterov=True, decay=0.1):
    """Every matrix of the parameter alone, in float64."""
    weight = _draw(shape, index).double()
    matrices = weight.view(-1, *shape[-2:]).unbind()
    buffers = [torch.zeros_like(matrix) for matrix in matrices]
    for step in range(steps):
        grads = _draw(shape, 100 * step + index).double().view(-1, *shape[-2:])
        new = [
            reference.muon(
                *(matrix, grad, buffer),
                lr=0.02,
                momentum=momentum,
                nesterov=nesterov,
                weight_decay=decay,
                scale=scale,
            )
            for matrix, grad, buffer in zip(matrices, grads, buffers, strict=True)
        ]
        matrices, buffers = [w for w, _ in new], [b for _, b in new]
    return torch.stack(list(matrices)).view(shape)


def _take(named, optimizer, steps):
    for step in range(steps):
        for index, (_, parameter) in enumerate(named):
            parameter.main_grad = _draw(parameter.shape, 100 * step + index)
        optimizer.step()


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (1, 7), (3, 4, 6), (2, 1, 1)])
@pytest.mark.parametrize("scale", ["shape", "adamw_rms"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_every_matrix_of_a_stack_is_the_reference(alone, shape, scale, nesterov):
    named = _named([shape])
    options = {"scale": scale, "nesterov": nesterov, "momentum": 0.8}
    optimizer = ShardedMuon(
        named,
        alone,
        lr=0.02,
        matrices=_all_matrices,
        product_dtype=torch.float32,
        **options,
    )
    _take(named, optimizer, STEPS)
    expected = _oracle(shape, 0, STEPS, **options)
    torch.testing.assert_close(named[0][1].double(), expected, rtol=0, atol=FP32_TOLERANCE * STEPS)


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16)])
@pytest.mark.parametrize("scale", ["shape", "adamw_rms"])
def test_as_near_to_float64_as_torch(alone, shape, scale):
    named, theirs = _named([shape]), _named([shape])
    ours = ShardedMuon(named, alone, lr=0.02, scale=scale, matrices=_all_matrices)
    torchs = torch.optim.Muon(
        [theirs[0][1]],
        lr=0.02,
        adjust_lr_fn="original" if scale == "shape" else "match_rms_adamw",
    )
    for step in range(STEPS):
        theirs[0][1].grad = _draw(shape, 100 * step)
        torchs.step()
    _take(named, ours, STEPS)
    exact = _oracle(shape, 0, STEPS, scale=scale)
    error, allowed = ((each[0][1] - exact).square().mean().sqrt() for each in (named, theirs))
    assert 0 < allowed < 0.02
    assert error <= 2 * allowed
    ratio = ((named[0][1] - _draw(shape, 0)) * (exact - _draw(shape, 0))).sum() / (
        exact - _draw(shape, 0)
    ).square().sum()
    assert ratio.item() == pytest.approx(1.0, abs=0.02)


def _orthogonalize(stacks, dtype=torch.float32):
    return orthogonalize([scale_to_unit(stack, dtype) for stack in stacks], num_iterations=5)


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 6), st.integers(1, 6)), min_size=0, max_size=6
    ),
    limit=st.sampled_from([1, 30, 2**28]),
    scale=st.sampled_from([1e-12, 1.0, 1e6]),
)
def test_batches_of_stacks_are_single_matrices(shapes, limit, scale):
    stacks = [_draw(shape, i) * scale for i, shape in enumerate(shapes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("olmo_distopt._newton_schulz._BATCH_NUMEL", limit)
        got = _orthogonalize(stacks)
    assert [tuple(each.shape) for each in got] == list(shapes)
    for stack, result in zip(stacks, got, strict=True):
        for matrix, mine in zip(stack.double(), result, strict=True):
            want = reference.orthogonalize(matrix)
            torch.testing.assert_close(mine.double(), want, rtol=0, atol=FP32_TOLERANCE)


def test_singular_values_end_near_one_and_zeros_stay_zeros():
    matrix = _draw((8, 12), 0)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    (result,) = _orthogonalize([matrix[None]])
    inside = u.T @ result[0] @ vh.T
    assert inside.diagonal().sub(1).abs().max() < 0.4
    assert (inside - inside.diagonal().diag()).abs().max() < 1e-4
    assert not _orthogonalize([torch.zeros(2, 3, 4)], torch.bfloat16)[0].any()


def test_the_rest_is_adamw(alone):
    shapes = {
        "embed.weight": (6, 4),
        "lm_head.weight": (6, 4),
        "blocks.0.norm.weight": (4,),
        "blocks.0.router.weight": (3, 4),
        "blocks.0.experts.up_bias": (3, 4),
    }
    both = []
    for make in (ShardedMuon, ShardedAdamW):
        named: list[tuple[str, Any]] = [
            (name, nn.Parameter(_draw(shape, len(name)))) for name, shape in shapes.items()
        ]
        optimizer = make(named, alone, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
        assert not any(key.startswith("momentum") for key in optimizer.state_dict())
        _take(named, optimizer, STEPS)
        both.append(named)
    for (name, mine), (_, other) in zip(*both, strict=True):
        assert torch.equal(mine, other), name


def test_what_is_a_hidden_matrix():
    yes = {
        "blocks.0.attention.q.weight": (4, 4),
        "blocks.0.experts.w_gate_up_E2HD": (2, 4, 4),
        "layers.3.mlp.gate_proj.weight": (4, 4),
        "layers.3.attn.out_proj.weight": (4, 4),
    }
    no = {
        "embedding.weight": (4, 4),
        "model.embed_tokens.weight": (4, 4),
        "wte.weight": (4, 4),
        "lm_head.weight": (4, 4),
        "head.weight": (4, 4),
        "unembedding.weight": (4, 4),
        "blocks.0.q_norm.weight": (4, 4),
        "blocks.0.experts.up_bias": (4, 4),
        "blocks.0.router.weight": (4, 4),
        "layers.3.mlp.gate.weight": (4, 4),
        "scale": (4,),
        "convolution": (2, 2, 2, 2),
    }
    for name, shape in (yes | no).items():
        assert is_hidden_matrix(name, nn.Parameter(torch.ones(shape))) == (name in yes), name


def test_bad_options(alone):
    named = _named([(2, 2)])
    for options, message in [
        ({"momentum": 1.0}, r"`momentum` must be in \[0, 1\), got 1.0"),
        ({"num_iterations": 0}, "`num_iterations` must be >= 1, got 0"),
        ({"scale": "rms"}, r"`scale` must be one of \('shape', 'adamw_rms'\), got 'rms'"),
        ({"product_dtype": torch.float16}, "must be bfloat16 or float32, got torch.float16"),
        ({"lr": -1.0}, r"`lr` must be in \[0, inf\), got -1.0"),
        ({"moment_dtype": torch.float16}, "`moment_dtype` must be float32 or bfloat16"),
        ({"moment_dtype": torch.bfloat16, "momentum": 0.999}, "`momentum` must be at most 1 - 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            ShardedMuon(named, alone, **({"lr": 0.1} | options))
    with pytest.raises(ValueError, match=r"`p0` must be a matrix or a stack .* got shape \(2,\)"):
        ShardedMuon(_named([(2,)]), alone, lr=0.1, matrices=lambda *_: True)


def _steps(rank, world, shapes, group_of, dtype, bucket_bytes):
    groups = ReplicaGroups(
        {"all": dist.group.WORLD, "own": None}, lambda name, _: group_of[int(name[1:])]
    )
    named: list[tuple[str, Any]] = [
        (n, nn.Parameter(p.detach().to(dtype))) for n, p in _named(shapes)
    ]
    optimizer = ShardedMuon(
        named,
        groups,
        lr=0.02,
        matrices=_all_matrices,
        product_dtype=torch.float32,
        min_shard_numel=4,
        bucket_bytes=bucket_bytes,
    )
    _take(named, optimizer, 2)
    held = {
        key: (value.start, value.local.numel())
        for key, value in optimizer.state_dict().items()
        if key != "step"
    }
    return [parameter.detach() for _, parameter in named], held


@pytest.mark.dist
@settings(max_examples=8, deadline=None, phases=PHASES)
@given(
    world=st.integers(1, 4),
    shapes=st.lists(
        st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bucket_bytes=st.sampled_from([1, 100, 10**6]),
    data=st.data(),
)
def test_any_group_equals_one_process(processes, world, shapes, dtype, bucket_bytes, data):
    group_of = [data.draw(st.sampled_from(["all", "all", "own"])) for _ in shapes]
    _compare_with_one_process(processes, world, shapes, group_of, dtype, bucket_bytes)


@settings(max_examples=3, deadline=None)
@given(
    world=st.integers(5, 7),
    shapes=st.lists(
        st.sampled_from([(3, 2), (13, 2, 2), (6, 2, 3), (2, 3, 2), (4,), (1, 5)]),
        min_size=2,
        max_size=8,
    ),
    bucket_bytes=st.sampled_from([1, 10**6]),
)
def test_groups_of_five_to_seven_equal_one_process(threads, world, shapes, bucket_bytes):
    """Stacks of more and of fewer matrices than ranks, and none that divides evenly by all."""
    group_of = ["all"] * len(shapes)
    _compare_with_one_process(threads, world, shapes, group_of, torch.float32, bucket_bytes)


def _compare_with_one_process(ranks, world, shapes, group_of, dtype, bucket_bytes):
    results = ranks.run(_steps, shapes, group_of, dtype, bucket_bytes, world=world)
    single = [(n, nn.Parameter(p.detach().to(dtype))) for n, p in _named(shapes)]
    groups = ReplicaGroups({"own": None}, lambda *_: "own")
    optimizer = ShardedMuon(
        single, groups, lr=0.02, matrices=_all_matrices, product_dtype=torch.float32
    )
    _take(single, optimizer, 2)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 0.0
    for weights, _ in results:
        for index, (mine, (name, want)) in enumerate(zip(weights, single, strict=True)):
            torch.testing.assert_close(mine, want.detach(), rtol=rounding, atol=FP32_TOLERANCE * 2)
            if group_of[index] == "all":
                assert torch.equal(mine, results[0][0][index]), f"replicas of {name} differ"
    for index, shape in enumerate(shapes):
        if len(shape) < 2 or group_of[index] == "own":
            continue
        # Each matrix has one owner, in rank order, and is never cut.
        pieces = [held[f"momentum.p{index}"] for _, held in results]
        size = math.prod(shape[-2:])
        if size and math.prod(shape):
            assert all(start % size == length % size == 0 for start, length in pieces)
            owned = [
                e
                for start, length in pieces
                for e in range(start // size, (start + length) // size)
            ]
            assert owned == list(range(math.prod(shape) // size))


def _loads(rank, world):
    groups = ReplicaGroups({"all": dist.group.WORLD}, lambda *_: "all")
    shapes = [(8, 4, 4), *[(4, 4)] * 9, (16, 4), (2,)]
    optimizer = ShardedMuon(_named(shapes), groups, lr=0.1, matrices=_all_matrices)
    state: dict[str, Any] = optimizer.state_dict()
    return sum(v.local.numel() for key, v in state.items() if key.startswith("momentum"))


@pytest.mark.dist
def test_work_is_shared_out_evenly(processes):
    """A stack of 8, nine of its matrices and one four times as large: 21 matrices over 4 ranks."""
    loads = processes.run(_loads, world=4)
    assert sum(loads) == 21 * 16
    assert max(loads) == 6 * 16
