"""The balance report: limiting tables in closed form, and its laws."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_routing import (
    BalanceReport,
    balance_loss,
    measure_balance,
    measure_load,
    route,
    stack_reports,
)


def test_six_tokens_two_experts():
    # Two rows (1, 0) win expert 0, four rows (0.4, 0.6) win expert 1: counts (2, 4), so that
    # f = (1/3, 2/3), while P = ((2 + 1.6) / 6, 2.4 / 6) = (3/5, 2/5): the mass lies where the
    # routes do not. L = 2 (1/3 * 3/5 + 2/3 * 2/5) = 14/15; the largest load is 4 of a mean of 3.
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
    # A part x of the tokens goes to expert 0, f = (x, 1 - x), and with P = (p, 1 - p)
    # L = 2 (x p + (1 - x)(1 - p)) = 2 (1 - x) - 2 (1 - 2 x) p. For x < 1/2 it falls with p. No
    # token of expert 0 gives it more than 1 and no token of expert 1 gives expert 0 as much as
    # 1/2, so p < x + (1 - x) / 2 and L > 1 - x + 2 x^2, which is least at x = 1/4: 7/8. For
    # x > 1/2 exchange the experts. The limit is reached by these tables: `first` of 8 tokens are
    # sure of expert 0, the rest are split evenly, by nothing, and go to expert 1.
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
    # A of E experts take all routes in turn: f = 1 / A on them and L = E / A times their mass. A
    # token's K winners hold at least as much each as any loser. Least mass lies on the active when
    # the other A - K of them get none and the winners share evenly with the E - A cold experts:
    # K / (K + E - A) of it, and L = E K / (A (E - A + K)).
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
        "routes": 0.0,
        "imbalance": 1.0,
        "rank_imbalance": 1.0,
        "kept_imbalance": 1.0,
        "kept_rank_imbalance": 1.0,
        "dropped_routes": 0.0,
        "entropy_deficit": 0.0,
        "coefficient_of_variation": 0.0,
        "score_variation": 0.0,
        "dead_experts": 4,
        "dead_mass": 0.0,
        "balance_loss": 0.0,
        "cross_term": 0.0,
        "honesty": 1.0,
        "topk_margin": 0.0,
        "tokens_with_drops": 0.0,
        "dropped_weight": 0.0,
        "gerrymandered": False,
    }


def test_two_experts_approach_their_infimum_by_strict_wins():
    ids = torch.tensor([[0]] * 2 + [[1]] * 6)
    losses = []
    for lead in (0.2, 0.1, 0.01, 0.001):
        scores = torch.tensor([[1.0, 0.0]] * 2 + [[0.5 - lead, 0.5 + lead]] * 6)
        assert torch.equal(scores.argmax(1, keepdim=True), ids)
        losses.append(measure_balance(scores, ids).balance_loss.item())
    assert losses == sorted(losses, reverse=True)
    assert 7 / 8 < losses[-1] < 7 / 8 + 1e-3


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**31))
def test_two_experts_are_never_below_their_infimum(num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    first = torch.where(torch.rand(num_tokens, generator=generator) < 0.7, first, first.round())
    scores = torch.stack([first, 1 - first], 1)
    report = measure_balance(scores, scores.argmax(1, keepdim=True))
    assert report.balance_loss.item() >= 7 / 8 - 1e-12


# Four experts on two ranks; six tokens with two routes each, the last token padding.
IDS = torch.tensor([[0, 1], [0, 1], [0, 2], [0, -1], [3, 0], [2, 3]])
REAL = torch.tensor([1, 1, 1, 1, 1, 0]).bool()
KEPT = torch.tensor([[0, 1], [0, -1], [-1, -1], [0, -1], [3, 0], [-1, -1]])
WEIGHTS = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.5, 0.5], [1.0, 9.0], [0.5, 0.5], [7.0, 7.0]])


def test_what_was_dropped_and_where_it_lies():
    scores = torch.rand(6, 4, dtype=torch.float64)
    report = measure_balance(
        scores, IDS, mask_T=REAL, kept_ids_TK=KEPT, weights_TK=WEIGHTS, num_ranks=2
    )
    # Requested (5, 2, 1, 1), kept (4, 1, 0, 1).
    assert report.imbalance.item() == pytest.approx(5 * 4 / 9)
    assert report.rank_imbalance.item() == pytest.approx(7 * 2 / 9)
    assert report.kept_imbalance.item() == pytest.approx(4 * 4 / 6)
    assert report.kept_rank_imbalance.item() == pytest.approx(5 * 2 / 6)
    assert report.dropped_routes.item() == pytest.approx(3 / 9)
    assert report.tokens_with_drops.item() == pytest.approx(2 / 5)
    assert report.dropped_weight.item() == pytest.approx((0.5 + 0.5 + 0.5) / 5)
    assert report.dead_experts.item() == 0


def test_counts_alone_say_how_much_was_dropped_but_not_whose():
    scores, kept = torch.rand(6, 4), torch.tensor([4, 1, 0, 1], dtype=torch.int32)
    by_ids = measure_balance(scores, IDS, mask_T=REAL, kept_ids_TK=KEPT, num_ranks=2)
    by_counts = measure_balance(scores, IDS, mask_T=REAL, kept_counts_E=kept, num_ranks=2)
    for name in ("kept_imbalance", "kept_rank_imbalance", "dropped_routes", "imbalance"):
        assert torch.equal(getattr(by_ids, name), getattr(by_counts, name))
    assert by_ids.tokens_with_drops.item() == pytest.approx(2 / 5)
    assert by_ids.dropped_weight.isnan()
    assert by_counts.tokens_with_drops.isnan()
    assert by_counts.dropped_weight.isnan()


def test_everything_kept_is_nothing_dropped():
    scores = torch.rand(6, 4)
    plain = measure_balance(scores, IDS, mask_T=REAL, num_ranks=4)
    kept = measure_balance(
        scores, IDS, mask_T=REAL, kept_ids_TK=IDS, weights_TK=WEIGHTS, num_ranks=4
    )
    for field in dataclasses.fields(plain):
        assert torch.equal(getattr(plain, field.name), getattr(kept, field.name)), field.name
    assert plain.kept_imbalance == plain.imbalance == plain.rank_imbalance
    assert plain.dropped_routes == plain.tokens_with_drops == plain.dropped_weight == 0


def test_even_kept_counts_do_not_hide_an_uneven_request():
    ids = torch.tensor([[0]] * 9 + [[1]] * 3)
    kept = torch.where(torch.arange(12)[:, None] < 6, -1, ids)
    report = measure_balance(torch.rand(12, 2), ids, kept_ids_TK=kept)
    assert report.kept_imbalance.item() == 1.0
    assert report.imbalance.item() == 1.5
    assert report.dropped_routes.item() == 0.5


def test_one_transfer_logs_all_layers():
    layers = [
        measure_balance(torch.rand(6, 4), IDS, mask_T=REAL, kept_ids_TK=KEPT, num_ranks=2)
        for _ in range(3)
    ]
    table = stack_reports(layers)
    assert table.dtype == torch.float64
    assert table.shape == (3, len(BalanceReport.names()))
    for row, report in zip(table.tolist(), layers, strict=True):
        for name, value in zip(BalanceReport.names(), row, strict=True):
            assert value == pytest.approx(float(getattr(report, name)), rel=0, nan_ok=True), name


def test_one_expert():
    report = measure_balance(torch.rand(5, 1), torch.zeros(5, 1).long())
    assert report.balance_loss.item() == report.imbalance.item() == report.honesty.item() == 1.0
    assert report.entropy_deficit.item() == report.topk_margin.item() == 0.0


SCORES = torch.full((6, 4), 0.25)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"kept_ids_TK": KEPT >= 0},
            TypeError,
            r"`kept_ids_TK` must be int64, got torch.bool; ",
        ),
        ({"kept_ids_TK": KEPT.double()}, TypeError, "`kept_ids_TK` must be int64, got torch.float"),
        ({"kept_ids_TK": KEPT.int()}, TypeError, r"got torch.int32; call `.long\(\)`"),
        ({"kept_ids_TK": KEPT.tolist()}, TypeError, "`kept_ids_TK` must be a tensor, got list"),
        ({"kept_ids_TK": KEPT.to("meta")}, ValueError, "`kept_ids_TK` must be on cpu .*got meta"),
        ({"kept_ids_TK": torch.full((6, 2), 99)}, ValueError, "got another id for 10 routes"),
        ({"kept_ids_TK": IDS.flip(1)}, ValueError, "the requested id of each kept route and -1"),
        (
            {"kept_counts_E": torch.tensor([5, 2, 1, 2])},
            ValueError,
            "must not exceed the request",
        ),
        ({"kept_counts_E": torch.tensor([5, -2, 1, 1])}, ValueError, "must not be negative, got"),
        (
            {"kept_counts_E": torch.ones(4).bool()},
            TypeError,
            "must hold numbers of routes, got",
        ),
        ({"kept_counts_E": torch.ones(4, device="meta")}, ValueError, "must be on cpu"),
        (
            {"weights_TK": KEPT},
            TypeError,
            "`weights_TK` must be a floating-point tensor",
        ),
        ({"weights_TK": WEIGHTS.to("meta")}, ValueError, "`weights_TK` must be on cpu"),
        ({"weights_TK": -WEIGHTS}, ValueError, "must not be negative, got 9 routes of negative"),
    ],
)
def test_what_was_kept_is_not_guessed(given, error, message):
    with pytest.raises(error, match=message):
        measure_balance(SCORES, IDS, mask_T=REAL, **given)


def test_what_was_kept_of_padding_may_be_anything():
    kept = torch.where(REAL[:, None], KEPT, 77)
    weights = torch.where(REAL[:, None], WEIGHTS, -1.0)
    got, expected = (
        measure_balance(SCORES, IDS, mask_T=REAL, kept_ids_TK=ids, weights_TK=w)
        for ids, w in ((kept, weights), (KEPT, WEIGHTS))
    )
    for name in got.names():
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


def test_a_default_dtype_of_low_precision_rounds_no_field():
    ids = torch.arange(3000)[:, None] % 4
    scores = torch.rand(3000, 4).softmax(1)
    kept = torch.where(torch.arange(3000)[:, None] < 1001, -1, ids)

    def report():
        return measure_balance(scores, ids, kept_ids_TK=kept, weights_TK=scores[:, :1])

    expected = report()
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = report()
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.tokens_with_drops.item() == pytest.approx(1001 / 3000, rel=1e-6)
    for name in got.names():
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


def test_messages_of_what_was_kept():
    def measure(**arguments):
        measure_balance(torch.rand(5, 4), torch.zeros(5, 2).long(), **arguments)

    with pytest.raises(ValueError, match="`num_ranks` must divide the 4 experts, got 3"):
        measure(num_ranks=3)
    with pytest.raises(ValueError, match="must not both be given"):
        measure(kept_ids_TK=torch.zeros(5, 2).long(), kept_counts_E=torch.zeros(4))
    with pytest.raises(ValueError, match=r"`kept_counts_E` must have shape \(4,\), got \(3,\)"):
        measure(kept_counts_E=torch.zeros(3))
    with pytest.raises(ValueError, match=r"`kept_ids_TK` must have the shape \(5, 2\) of"):
        measure(kept_ids_TK=torch.zeros(5, 3).long())
    with pytest.raises(ValueError, match=r"`weights_TK` must have the shape \(5, 2\) of"):
        measure(weights_TK=torch.zeros(5))
    with pytest.raises(ValueError, match="`reports` must hold at least one report, got none"):
        stack_reports([])
    kinds = [measure_load(torch.ones(4), torch.ones(4)), measure_balance(torch.ones(1, 4), IDS[:1])]
    with pytest.raises(TypeError, match=r"of one kind, got \['BalanceReport', 'LoadReport'\]"):
        stack_reports(kinds)


def test_messages():
    with pytest.raises(ValueError, match="one row a token of `scores_TE`"):
        measure_balance(torch.rand(5, 4), torch.zeros(4, 2).long())
    with pytest.raises(TypeError, match="`mask_T` must be bool"):
        measure_balance(torch.rand(5, 4), torch.zeros(5, 2).long(), mask_T=torch.ones(5))
