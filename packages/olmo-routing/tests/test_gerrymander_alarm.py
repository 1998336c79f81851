"""The alarm over a window: silent on honest routers, on for gerrymandered ones."""

import copy
import dataclasses
import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_routing import GerrymanderAlarm, measure_balance, measure_load
from torch import nn


def reports_of(counts_LE, mean_scores_LE):
    """Return one report a layer of given route counts and mean scores, quickly for many layers."""
    num_experts = counts_LE.shape[1]
    routes_L = counts_LE.sum(1)
    f_LE = counts_LE / routes_L[:, None] - 1 / num_experts
    columns = {
        "routes": routes_L,
        "cross_term": num_experts * (f_LE * (mean_scores_LE - 1 / num_experts)).sum(1),
        "coefficient_of_variation": (num_experts * f_LE.square().sum(1)).sqrt(),
        "imbalance": num_experts * counts_LE.max(1).values / routes_L,
    }
    first = measure_load(counts_LE[0], mean_scores_LE[0])
    for name, column in columns.items():
        torch.testing.assert_close(column[0], getattr(first, name), rtol=1e-5, atol=1e-7)
    rows = zip(*columns.values(), strict=True)
    return [dataclasses.replace(first, **dict(zip(columns, row, strict=True))) for row in rows]


def sampled(probabilities_LTE, top_k, distinct, generator):
    """Return the counts of routes that tokens draw from their own probabilities, `counts_LE`."""
    num_layers, num_tokens, num_experts = probabilities_LTE.shape
    if distinct:
        race = torch.empty_like(probabilities_LTE).exponential_(generator=generator)
        ids = (probabilities_LTE / race).topk(top_k, dim=2).indices
    else:
        flat = probabilities_LTE.view(-1, num_experts)
        ids = torch.multinomial(flat, top_k, replacement=True, generator=generator)
    ids_LN = ids.view(num_layers, num_tokens * top_k)
    counts_LE = torch.zeros(num_layers, num_experts, dtype=torch.float64)
    return counts_LE.scatter_add_(1, ids_LN, torch.ones(ids_LN.shape, dtype=torch.float64))


def history(alarm, steps):
    """Return whether the alarm was on after each step of (counts, mean scores), `on_SL`."""
    return torch.stack([alarm.update(reports_of(counts, scores)) for counts, scores in steps])


@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(4, 8, 1), (4, 64, 2), (64, 32, 4)])
@pytest.mark.parametrize(("spread", "trend"), [(0.0, 1), (0.1, 3), (0.5, 0), (0.5, 3), (2.0, -1)])
def test_honest_routers_raise_no_alarm(tokens, experts, top_k, spread, trend, distinct):
    # 100 routers, 40 windows each: the rate of false alarms is below 1 in 4000 by this test alone,
    # and by the derivation far below. Their loads drift, from even ones or to even ones.
    generator = torch.Generator().manual_seed(tokens + experts)
    lean = spread * torch.randn(100, 1, experts, generator=generator)
    alarm = GerrymanderAlarm(experts, num_layers=100, window=20)

    def steps(num_steps=60):
        for step in range(num_steps):
            logits = spread * torch.randn(100, tokens, experts, generator=generator)
            logits = logits + lean * (1 + (trend - 1) * step / num_steps)
            probabilities = logits.softmax(2)
            counts = sampled(probabilities, top_k, distinct, generator)
            yield counts, probabilities.double().mean(1)

    assert not history(alarm, steps()).any()


def test_the_rule_for_one_batch_would_cry_wolf():
    # What the window is for: every other honest small batch has a loss below 1.
    generator = torch.Generator().manual_seed(1)
    probabilities = (0.05 * torch.randn(400, 16, 8, generator=generator)).softmax(2)
    counts = sampled(probabilities, 2, True, generator)
    reports = reports_of(counts, probabilities.double().mean(1))
    below = sum(report.cross_term.item() < -1e-5 for report in reports)
    assert 100 < below < 300


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 64), st.floats(0, 8), st.integers(0, 2**31))
def test_the_bound_of_the_derivation(experts, spread, seed):
    # E over a route of exp(-(E P_e - 1)) is at most 1 for any P: what rule 1 stands on.
    generator = torch.Generator().manual_seed(seed)
    p = (spread * torch.randn(experts, generator=generator, dtype=torch.float64)).softmax(0)
    assert (p * torch.exp(1 - experts * p)).sum() <= 1 + 1e-12


@pytest.mark.parametrize(("spread", "bound"), [(0.1, 1.0), (0.1, 2.0), (0.3, 1.0), (1.0, 1.0)])
def test_chance_takes_the_loss_below_one_no_more_often_than_derived(spread, bound):
    generator = torch.Generator().manual_seed(2)
    probabilities = (spread * torch.randn(20000, 4, 8, generator=generator)).softmax(2)
    counts = sampled(probabilities, 1, True, generator)
    f, mean_scores = counts / 4, probabilities.double().mean(1)
    gap = 4 * (1 - 8 * (f * mean_scores).sum(1))
    assert (gap >= bound).double().mean() <= math.exp(-bound)


@pytest.mark.parametrize(("routes", "experts"), [(4, 64), (128, 16), (16, 2)])
def test_even_experts_are_uneven_no_more_often_than_derived(routes, experts):
    # Sums over 20 steps of Pearson's statistic, beyond its degrees of freedom, at odds of e^4.
    generator = torch.Generator().manual_seed(3)
    even = torch.full((10000, routes, experts), 1 / experts)
    counts = sampled(even, 1, True, generator)
    pearson = (experts / routes * (counts - routes / experts).square()).sum(1)
    degrees, odds = 20 * (experts - 1), 4
    beyond = pearson.view(-1, 20).sum(1) - degrees
    bound = 2 * math.sqrt(degrees * odds) + 2 * odds
    assert (beyond > bound).double().mean() <= math.exp(-odds)
    assert beyond.mean().abs() < 0.1 * bound  # nor is it that the statistic is far below


def test_mass_that_does_not_fit_into_distinct_routes_is_found():
    # Top-2 of 3: half the tokens are torn between 0 and 1, half are sure of 2 and need another.
    torn, sure = [0.5 - 1e-6, 0.5 - 1e-6, 2e-6], [1e-6, 1e-6, 1 - 2e-6]
    probabilities = torch.tensor([torn, sure] * 50)[None]
    generator = torch.Generator().manual_seed(4)
    counts = sampled(probabilities, 2, True, generator)
    (report,) = reports_of(counts, probabilities.double().mean(1))
    assert 1 + report.cross_term.item() == pytest.approx(15 / 16, abs=0.02)
    alarm = GerrymanderAlarm(3)
    assert [alarm.update([report]).item() for _ in range(3)] == [False, True, True]


def gamed(kind, step, num_steps, generator):
    """Return counts and mean scores of one step of a router that plays the game."""
    experts = 16
    routes = 2048 if kind == "on its way" else 128  # a trend within a window takes more to see
    load = torch.linspace(2.0, 0.2, experts, dtype=torch.float64)
    load = load / load.sum()
    even = torch.full((experts,), 1 / experts, dtype=torch.float64)
    if kind == "mass on losers":
        scores = even + 0.2 * (even - load)
    elif kind == "blind":
        scores = even
    elif kind == "nearly blind":
        scores = even + 0.02 * (load - even)
    else:  # from honest to all but blind while the load gets worse
        part = step / num_steps
        load = even + (0.7 + 0.3 * part) * (load - even)
        scores = even + 0.9 * (1 - 0.95 * part) * (load - even)
    drawn = torch.multinomial(load, routes, replacement=True, generator=generator)
    return drawn.bincount(minlength=experts).double()[None], scores[None]


@pytest.mark.parametrize("kind", ["mass on losers", "blind", "nearly blind", "on its way"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gerrymandered_routers_raise_it_within_the_window(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    window = 100
    steps = [gamed(kind, step, window, generator) for step in range(window)]
    on = history(GerrymanderAlarm(16, window=window), steps)[:, 0]
    assert on[-1]
    if kind == "mass on losers":  # the loss is below 1: no need to wait for a full window
        assert on[: window // 2].any()
    else:
        assert not on[:-1].any()


def test_each_rule_is_needed():
    # Undo what one rule looks at, and what only it can see is no alarm any more.
    def last(kind, **options):
        generator = torch.Generator().manual_seed(5)
        steps = [gamed(kind, step, 100, generator) for step in range(100)]
        return history(GerrymanderAlarm(16, window=100, **options), steps)[-1].item()

    assert last("blind", least_honesty=0.01)
    assert not last("nearly blind", least_honesty=0.0)
    assert not last("blind", least_imbalance=3.0)
    assert not last("on its way", least_imbalance=3.0)
    assert last("on its way", least_honesty=0.0)
    assert last("mass on losers", least_honesty=0.0, least_imbalance=9.0)


def test_an_honest_loss_may_fall_while_the_busiest_expert_rises():
    # One expert runs off while all others even out: the loss falls, and so does E sum f^2.
    generator = torch.Generator().manual_seed(6)
    before = torch.tensor([1.6] * 8 + [0.4] * 8, dtype=torch.float64) / 16
    after = torch.tensor([2.4] + [13.6 / 15] * 15, dtype=torch.float64) / 16
    alarm = GerrymanderAlarm(16, window=100)
    losses, imbalances, on = [], [], []
    for step in range(150):
        p = before + (after - before) * step / 150
        drawn = torch.multinomial(p, 512, replacement=True, generator=generator)
        (report,) = reports_of(drawn.bincount(minlength=16).double()[None], p[None])
        on.append(alarm.update([report]).item())
        losses.append(1 + report.cross_term.item())
        imbalances.append(report.imbalance.item())
    assert sum(losses[:50]) > sum(losses[100:]) + 2
    assert sum(imbalances[:50]) < sum(imbalances[100:]) - 5
    assert not any(on)


def test_an_honest_collapse_and_an_even_load_are_no_alarm():
    # A loss of 4 that says 4, and probabilities that lie about loads that are exactly even.
    collapsed = torch.tensor([4.0, 0, 0, 0], dtype=torch.float64)
    alarm = GerrymanderAlarm(4, num_layers=2, window=20)
    counts = torch.stack([100 * collapsed, torch.full((4,), 100.0, dtype=torch.float64)])
    assert not history(alarm, [(counts, collapsed.expand(2, 4) / 4)] * 30).any()


def test_layers_are_watched_one_by_one():
    generator = torch.Generator().manual_seed(7)
    alarm = GerrymanderAlarm(16, num_layers=3, window=20)
    steps = []
    for step in range(20):
        layers = [gamed(kind, step, 20, generator) for kind in ("mass on losers", "blind")]
        layers.append((torch.full((1, 16), 8.0).double(), torch.full((1, 16), 1 / 16).double()))
        steps.append(tuple(torch.cat(part) for part in zip(*layers, strict=True)))
    assert history(alarm, steps)[-1].tolist() == [True, True, False]


def test_reports_of_a_batch_and_of_sums_are_taken():
    scores = torch.tensor([[1.0, 0.0]] * 200 + [[0.4, 0.6]] * 400)
    ids = torch.tensor([[0]] * 200 + [[1]] * 400)
    report = measure_balance(scores, ids)
    summed = measure_load(torch.tensor([200, 400]), scores.sum(0))
    assert report.routes.item() == summed.routes.item() == 600
    # 600 routes at 14/15: 40 of the 20.7 that a false alarm in 1e9 takes.
    for each in (report, summed):
        assert GerrymanderAlarm(2).update([each]).tolist() == [True]
    six = measure_balance(scores[::100], ids[::100])
    assert six.gerrymandered
    alarm = GerrymanderAlarm(2)
    first = [alarm.update([six]).item() for _ in range(200)].index(True)
    assert first + 1 == math.ceil(math.log(1e9) / (6 / 15))


@pytest.mark.parametrize("missing", ["nan", "no routes"])
def test_a_missing_step_delays_and_hides_nothing_longer_than_a_window(missing):
    generator = torch.Generator().manual_seed(8)
    alarm = GerrymanderAlarm(16, window=20)
    steps = [gamed("blind", step, 60, generator) for step in range(60)]
    counts, scores = steps[30]
    if missing == "nan":
        steps[30] = counts, scores * math.nan
        expected = [False] * 19 + [True] * 11 + [False] * 20 + [True] * 10
        on = []
        for counts, scores in steps:
            report = measure_load(counts[0], scores[0])
            on.append(alarm.update([report]).item())
    else:
        expected = [False] * 19 + [True] * 41
        on = []
        for step, (counts, scores) in enumerate(steps):
            report = measure_load(counts[0] * (step != 30), scores[0] * (step != 30))
            on.append(alarm.update([report]).item())
    assert on == expected


def test_a_resumed_alarm_goes_on_where_it_was():
    generator = torch.Generator().manual_seed(9)
    steps = [gamed("blind", step, 40, generator) for step in range(40)]
    alarm = GerrymanderAlarm(16, window=20)
    history(alarm, steps[:15])
    file = io.BytesIO()
    torch.save(alarm.state_dict(), file)
    file.seek(0)
    fresh = GerrymanderAlarm(16, window=20)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for each in (copy.deepcopy(alarm), fresh):
        assert history(each, steps[15:])[:, 0].tolist() == [False] * 4 + [True] * 21
    alarm.reset_parameters()
    assert not history(alarm, steps[15:30]).any()


def test_starts_from_the_meta_device_and_says_what_it_is():
    with torch.device("meta"):
        alarm = GerrymanderAlarm(8, num_layers=3, window=20)
    alarm.to_empty(device="cpu")
    alarm.reset_parameters()
    assert alarm.history_4WL.isnan().all()
    assert isinstance(alarm, nn.Module)
    assert "num_experts=8, num_layers=3, window=20, least_honesty=0.05" in repr(alarm)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"window": 19}, ValueError, "`window` must be at least 20, got 19"),
        ({"window": 20.0}, TypeError, "`window` must be an int, got float"),
        ({"num_experts": 0}, ValueError, "`num_experts` must be at least 1, got 0"),
        ({"num_layers": 0}, ValueError, "`num_layers` must be at least 1, got 0"),
        ({"least_honesty": 1.0}, ValueError, r"`least_honesty` must be in \[0, 1\), got 1.0"),
        ({"least_honesty": math.nan}, ValueError, r"`least_honesty` must be in \[0, 1\), got nan"),
        ({"least_imbalance": 0.9}, ValueError, "`least_imbalance` must be finite and at least 1"),
        ({"least_imbalance": math.inf}, ValueError, "`least_imbalance` must be finite and at"),
    ],
)
def test_messages(arguments, error, message):
    with pytest.raises(error, match=message):
        GerrymanderAlarm(**{"num_experts": 4, **arguments})


def test_message_of_an_update():
    report = measure_load(torch.ones(4), torch.ones(4))
    with pytest.raises(ValueError, match=r"one report for each of `num_layers`=2 .*got 1"):
        GerrymanderAlarm(4, num_layers=2).update([report])
