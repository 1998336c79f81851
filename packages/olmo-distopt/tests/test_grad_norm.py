import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from olmo_distopt import ReplicaGroups, clip_factor, clip_grad_norm, global_grad_norm
from olmo_distopt.reference import global_norm
from torch import nn

NAN, INF = math.nan, math.inf


def _with_grad(values) -> Any:
    grad = torch.as_tensor(values, dtype=torch.float32)
    parameter: Any = nn.Parameter(torch.zeros_like(grad))
    parameter.main_grad = grad.clone()
    return parameter


@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_equals_the_definition(alone, norm_type):
    torch.manual_seed(1)
    shapes = [(7,), (3, 5), (), (2, 1, 4), (0, 3)]
    named = [(f"p{i}", _with_grad(torch.randn(shape))) for i, shape in enumerate(shapes)]
    expected = global_norm([p.main_grad for _, p in named], norm_type=norm_type)
    norm = global_grad_norm(named, alone, norm_type=norm_type)
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(expected.item(), rel=1e-7)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_squares_neither_overflow_nor_vanish(alone, scale):
    named = [("p", _with_grad([3 * scale, 4 * scale]))]
    assert global_grad_norm(named, alone).item() == pytest.approx(5 * scale, rel=1e-6)


def test_clips_to_the_norm_and_leaves_the_rest_alone(alone):
    named = [("a", _with_grad([3.0])), ("b", _with_grad([[4.0]]))]
    assert clip_grad_norm(named, alone, 1.0).item() == 5.0
    assert named[0][1].main_grad.item() == pytest.approx(0.6)
    assert named[1][1].main_grad.item() == pytest.approx(0.8)

    for max_norm in (5.0, 7.0, INF):
        named = [("a", _with_grad([3.0])), ("b", _with_grad([[4.0, -0.0]]))]
        assert clip_grad_norm(named, alone, max_norm).item() == 5.0
        assert named[0][1].main_grad.tolist() == [3.0]
        assert torch.signbit(named[1][1].main_grad).tolist() == [[False, True]]

    named = [("a", _with_grad([3.0, -4.0]))]
    assert clip_grad_norm(named, alone, 1.0, norm_type=INF).item() == 4.0
    assert named[0][1].main_grad.tolist() == [0.75, -1.0]


@pytest.mark.parametrize("norm_type", [2.0, INF])
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_a_non_finite_norm_changes_nothing(alone, norm_type, poison):
    named = [("good", _with_grad([300.0])), ("bad", _with_grad([poison, 400.0]))]
    norm = clip_grad_norm(named, alone, 1.0, norm_type=norm_type)
    assert norm.isnan().item() if math.isnan(poison) else norm.item() == INF
    assert named[0][1].main_grad.tolist() == [300.0]
    torch.testing.assert_close(
        named[1][1].main_grad, torch.tensor([poison, 400.0]), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("value", [0.0, 1e-30, 1.0, 7.0, 1e30, NAN, INF])
def test_the_factor_is_what_clipping_does(alone, value):
    named = [("p", _with_grad([value]))]
    factor = clip_factor(global_grad_norm(named, alone), 2.0)
    clip_grad_norm(named, alone, 2.0)
    torch.testing.assert_close(named[0][1].main_grad, value * factor[None], equal_nan=True)
    assert factor.shape == ()
    assert factor.item() == pytest.approx(2.0 / value if 2.0 < value < INF else 1.0)


@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_nothing_to_measure(alone, norm_type):
    assert clip_grad_norm([], alone, 1.0, norm_type=norm_type).item() == 0.0
    zeros = [("p", _with_grad([0.0, 0.0]))]
    assert clip_grad_norm(zeros, alone, 1.0, norm_type=norm_type).item() == 0.0
    assert zeros[0][1].main_grad.tolist() == [0.0, 0.0]


def test_bad_input(alone):
    named = [("p", _with_grad([1.0]))]
    for max_norm in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match="`max_norm` must be > 0"):
            clip_grad_norm(named, alone, max_norm)
        with pytest.raises(ValueError, match="`max_norm` must be > 0"):
            clip_factor(torch.tensor(1.0), max_norm)
    with pytest.raises(ValueError, match=r"`norm_type` must be 2.0 or `math.inf`, got 1.0"):
        global_grad_norm(named, alone, norm_type=1.0)
    with pytest.raises(ValueError, match="`bare` must have a `main_grad`"):
        global_grad_norm([("bare", nn.Parameter(torch.ones(1)))], alone)
    with pytest.raises(ValueError, match="the same one as `p` and `q`"):
        global_grad_norm([*named, ("q", named[0][1])], alone)
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    assert global_grad_norm([*named, ("frozen", frozen)], alone).item() == 1.0


def _stages(rank, world):
    """Two pipeline stages whose gradients have the norms 3 and 4; the second has two chunks."""
    groups = ReplicaGroups({"stage": None}, lambda name, _: "stage")
    values = [{"a": [3.0]}, {"b": [0.0, 4.0], "c": [0.0]}][rank]
    results = []
    for norm_type in (2.0, INF):
        named = [(name, _with_grad(value)) for name, value in values.items()]
        norm = clip_grad_norm(named, groups, 1.0, norm_type=norm_type)
        results.append((norm.item(), [p.main_grad.abs().max().item() for _, p in named]))
    return results


@pytest.mark.dist
def test_stages_are_scaled_by_one_factor(processes):
    (first, first_inf), (last, last_inf) = processes.run(_stages, world=2)
    assert first == (5.0, [pytest.approx(0.6)])
    assert last == (5.0, [pytest.approx(0.8), 0.0])
    assert first_inf == (4.0, [0.75])
    assert last_inf == (4.0, [1.0, 0.0])


def _layout(rank, world, poison):
    """2 stages x 2 data ranks: dense weights on 2 ranks, experts on 1, none on the first stage."""
    stage, data = divmod(rank, 2)
    pairs: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = ReplicaGroups({"dense": pairs[stage], "expert": None}, lambda name, _: name[:-1])
    named = [(f"dense{stage}", _with_grad([1.0, 2.0 + stage]))]
    if stage == 1:
        value = poison if data == 1 else 0.0
        named.append((f"expert{data}", _with_grad([value, 1.0 + data])))
    if rank == 0 and poison == 0.0:
        frozen: Any = nn.Parameter(torch.ones(1), requires_grad=False)
        named.append(("dense_", frozen))
    before = [p.main_grad.clone() for _, p in named[: 1 + stage]]
    norms = [global_grad_norm(named, groups, norm_type=kind).item() for kind in (2.0, INF)]
    # Only the ranks of the second stage, as a group; the other ranks make no call.
    if stage == 1:
        norms.append(global_grad_norm(named, groups, group=pairs[1]).item())
    norms.append(global_grad_norm(named if rank == 3 else [], groups, norm_type=INF).item())
    clip_grad_norm(named, groups, 2.0)
    clipped = [(p.main_grad / old).tolist() for old, (_, p) in zip(before, named, strict=False)]
    return norms, clipped


@pytest.mark.dist
@pytest.mark.parametrize("poison", [0.0, NAN, INF])
def test_every_parameter_counts_once_everywhere(processes, poison):
    results = processes.run(_layout, poison, world=4)
    # dense0 (1, 2), dense1 (1, 3), expert0 (0, 1), expert1 (poison, 2): each counted once
    true_norm = math.sqrt(5 + 10 + 1 + poison**2 + 4)
    second = math.sqrt(10 + 1 + poison**2 + 4)
    largest = max(3.0, poison) if not math.isnan(poison) else NAN
    only_rank_3 = max(2.0, poison) if not math.isnan(poison) else NAN
    factor = 2 / true_norm if math.isfinite(true_norm) else 1.0
    for rank, (norms, clipped) in enumerate(results):
        expected = [true_norm, largest, *([second] if rank >= 2 else []), only_rank_3]
        assert norms == pytest.approx(expected, rel=1e-6, nan_ok=True)
        assert clipped[0] == pytest.approx([factor, factor])
        if rank >= 2:
            assert clipped[1][1] == pytest.approx(factor)
