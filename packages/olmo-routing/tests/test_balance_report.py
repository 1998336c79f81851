"""The balance report: limiting tables in closed form, and its laws."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_routing import balance_loss, measure_balance, route


def test_six_tokens_two_experts():
    scores = torch.tensor([[1.0, 0.0]] * 2 + [[0.4, 0.6]] * 4)
    report = measure_balance(scores, torch.tensor([[0]] * 2 + [[1]] * 4))
    assert report.balance_loss.item() == pytest.approx(14 / 15, rel=1e-6)
    assert report.cross_term.item() == pytest.approx(-1 / 15, rel=1e-5)
    assert report.imbalance.item() == pytest.approx(4 / 3, rel=1e-6)
    assert report.honesty.item() == pytest.approx(-0.6, rel=1e-5)
    assert report.topk_margin.item() == pytest.approx((2 * 1.0 + 4 * 0.2) / 6, rel=1e-6)
    assert report.coefficient_of_variation.item() == pytest.approx(1 / 3, rel=1e-6)
    entropy = -(1 / 3 * math.log(1 / 3) + 2 / 3 * math.log(2 / 3))
    assert report.entropy_deficit.item() == pytest.approx(1 - entropy / math.log(2), rel=1e-5)
    assert report.dead_experts.item() == 0
    assert report.gerrymandered.item() is True


@pytest.mark.parametrize("first", range(9))
def test_two_experts_reach_seven_eighths_at_one_to_three(first):
    # `first` of 8 tokens are sure of expert 0, the rest are split evenly and go to expert 1.
    scores = torch.tensor([[1.0, 0.0]] * first + [[0.5, 0.5]] * (8 - first))
    ids = torch.tensor([[0]] * first + [[1]] * (8 - first))
    x = first / 8
    report = measure_balance(scores, ids)
    assert report.balance_loss.item() == pytest.approx(1 - x + 2 * x * x, rel=1e-6)
    assert report.balance_loss.item() >= 7 / 8 - 1e-6
    if first == 2:
        assert report.balance_loss.item() == pytest.approx(7 / 8, rel=1e-6)
        assert report.gerrymandered


@pytest.mark.parametrize(("experts", "active", "top_k"), [(64, 16, 1), (64, 16, 4), (12, 5, 2)])
def test_active_experts_that_win_by_a_hair(experts, active, top_k):
    # A of E experts take all routes in turn; a token spreads its mass over its winners and all
    # cold experts, which lose by nothing.
    ids = (torch.arange(active)[:, None] + torch.arange(top_k)) % active
    scores = torch.zeros(active, experts)
    scores[:, active:] = 1.0
    scores.scatter_(1, ids, 1.0)
    report = measure_balance(scores, ids)
    expected = experts * top_k / (active * (experts - active + top_k))
    assert report.balance_loss.item() == pytest.approx(expected, rel=1e-5)
    assert report.dead_experts.item() == experts - active
    assert report.imbalance.item() == pytest.approx(experts / active, rel=1e-6)
    assert report.honesty.item() < 0
    assert report.topk_margin.item() == 0.0
    assert report.gerrymandered
    if (experts, active, top_k) == (64, 16, 1):
        assert report.balance_loss.item() == pytest.approx(0.0816, abs=5e-5)


def test_honest_blind_and_collapsed():
    one_hot = torch.eye(4)[[0, 0, 0, 1, 1, 2]]
    honest = measure_balance(one_hot, torch.tensor([[0], [0], [0], [1], [1], [2]]))
    assert honest.honesty.item() == pytest.approx(1.0, rel=1e-6)  # P = f
    assert honest.dead_experts.item() == 1
    assert not honest.gerrymandered
    blind = measure_balance(torch.full((6, 4), 0.25), torch.zeros(6, 1).long())
    assert blind.honesty.item() == 0.0  # P = u whatever f is
    assert blind.balance_loss.item() == 1.0
    assert blind.imbalance.item() == 4.0
    assert blind.entropy_deficit.item() == 1.0
    assert blind.coefficient_of_variation.item() == pytest.approx(math.sqrt(3), rel=1e-6)
    assert not blind.gerrymandered


def test_evenly_loaded_is_honest_whatever_the_scores():
    for num_experts in (3, 7, 49):  # 1 / E is no float
        ids = torch.arange(num_experts * 5)[:, None] % num_experts
        report = measure_balance(torch.rand(num_experts * 5, num_experts), ids)
        assert report.honesty.item() == 1.0
        assert report.cross_term.item() == 0.0
        assert report.imbalance.item() == 1.0
        assert report.coefficient_of_variation.item() == 0.0
        assert report.entropy_deficit.item() == pytest.approx(0.0, abs=1e-6)
        assert report.balance_loss.item() == pytest.approx(1.0, rel=1e-6)
        assert not report.gerrymandered


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(1, 1, 2), (7, 2, 7), (31, 3, 8), (5, 4, 4), (13, 1, 3)]),
    st.sampled_from(["softmax", "sigmoid"]),
    st.integers(0, 2**31),
)
def test_agrees_with_numpy(sizes, gate, seed):
    num_tokens, top_k, num_experts = sizes
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    logits[:, 0] += 1
    mask = torch.rand(num_tokens, generator=generator) < 0.8
    mask[0] = True
    routing = route(logits, top_k, gate=gate)
    report = measure_balance(routing.scores_TE, routing.expert_ids_TK, mask_T=mask)

    scores = routing.scores_TE[mask].numpy()
    counts = np.bincount(routing.expert_ids_TK[mask].flatten().numpy(), minlength=num_experts)
    f, mass = counts / counts.sum(), (scores / scores.sum(1, keepdims=True)).mean(0)
    u = 1 / num_experts
    cross = num_experts * ((f - u) * (mass - u)).sum()
    assert report.cross_term.item() == pytest.approx(cross, abs=1e-12)
    assert report.balance_loss.item() == pytest.approx(1 + cross, rel=1e-12)
    assert report.imbalance.item() == pytest.approx(counts.max() / counts.mean(), rel=1e-12)
    assert report.coefficient_of_variation.item() == pytest.approx(
        counts.std() / counts.mean(), abs=1e-12
    )
    assert report.dead_experts.item() == (counts == 0).sum()
    if f.var() > 1e-12:
        slope = np.cov(f, mass, bias=True)[0, 1] / f.var()
        assert report.honesty.item() == pytest.approx(slope, rel=1e-9, abs=1e-9)
    positive = f[f > 0]
    deficit = 1 + (positive * np.log(positive)).sum() / np.log(num_experts)
    assert report.entropy_deficit.item() == pytest.approx(deficit, abs=1e-12)
    if top_k < num_experts:
        ordered = -np.sort(-scores, axis=1)
        margin = (ordered[:, top_k - 1] - ordered[:, top_k]).mean()
        assert report.topk_margin.item() == pytest.approx(margin, rel=1e-12)
    assert report.gerrymandered.item() == (cross < -1e-5 and counts.max() > counts.mean())


def test_padding_changes_nothing_and_nothing_carries_a_gradient():
    logits = torch.randn(9, 5, requires_grad=True)
    routing = route(torch.cat([logits, torch.randn(4, 5)]), 2)
    mask = torch.arange(13) < 9
    padded = measure_balance(
        torch.where(mask[:, None], routing.scores_TE, math.nan), routing.expert_ids_TK, mask_T=mask
    )
    alone = measure_balance(routing.scores_TE[:9], routing.expert_ids_TK[:9])
    for field in dataclasses.fields(alone):
        value = getattr(padded, field.name)
        torch.testing.assert_close(value, getattr(alone, field.name))
        assert value.ndim == 0
        assert not value.requires_grad
    loss = balance_loss(routing.scores_TE[:9], routing.expert_ids_TK[:9])
    assert torch.equal(alone.balance_loss, loss.detach())


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_without_any_route(num_tokens):
    report = measure_balance(
        torch.rand(num_tokens, 4),
        torch.full((num_tokens, 2), -1),
        mask_T=torch.zeros(num_tokens) > 0,
    )
    values = {f.name: getattr(report, f.name).item() for f in dataclasses.fields(report)}
    assert values == {
        "imbalance": 1.0,
        "entropy_deficit": 0.0,
        "coefficient_of_variation": 0.0,
        "dead_experts": 4,
        "balance_loss": 0.0,
        "cross_term": 0.0,
        "honesty": 1.0,
        "topk_margin": 0.0,
        "gerrymandered": False,
    }


def test_one_expert():
    report = measure_balance(torch.rand(5, 1), torch.zeros(5, 1).long())
    assert report.balance_loss.item() == report.imbalance.item() == report.honesty.item() == 1.0
    assert report.entropy_deficit.item() == report.topk_margin.item() == 0.0


def test_messages():
    with pytest.raises(ValueError, match="one row a token of `scores_TE`"):
        measure_balance(torch.rand(5, 4), torch.zeros(4, 2).long())
    with pytest.raises(TypeError, match="`mask_T` must be bool"):
        measure_balance(torch.rand(5, 4), torch.zeros(5, 2).long(), mask_T=torch.ones(5))
