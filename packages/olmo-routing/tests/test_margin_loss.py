"""The margin balance loss: its law, its gradient, and the games that it does not play."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from olmo_routing import Router, balance_loss, margin_balance_loss, route
from torch.nn import functional as F


def epsilon(temperature):
    return 1 / (1 + math.exp(1 / temperature))


def concentration(ids, num_experts, mask=None):
    """Return E * sum f^2, what the loss tends to."""
    ids = ids if mask is None else ids[mask]
    counts = ids[ids >= 0].bincount(minlength=num_experts).double()
    return (num_experts * (counts / max(ids.numel(), 1)).square().sum()).item()


def distances(row, chosen):
    """Return each expert's distance to the score that decides over it, by a loop."""
    inside = [row[e] for e in chosen]
    outside = [row[e] for e in range(len(row)) if e not in chosen]
    return [row[e] - (max(outside) if e in chosen else min(inside)) for e in range(len(row))], min(
        inside
    ) - max(outside)


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def value_oracle(scores, ids, temperature):
    """Return the loss of tokens that all have a margin, by loops over Python floats."""
    num_tokens, top_k, num_experts = len(scores), len(ids[0]), len(scores[0])
    loss = 0.0
    for e in range(num_experts):
        fraction = sum(row.count(e) for row in ids) / (num_tokens * top_k)
        for row, chosen in zip(scores, ids, strict=True):
            away, margin = distances(row, chosen)
            step = sigmoid(away[e] / (temperature * margin))
            loss += num_experts * fraction * step / (num_tokens * top_k)
    return loss


def widths(scores, ids, temperature):
    result = []
    for row, chosen in zip(scores, ids, strict=True):
        weakest = min(row[e] for e in chosen)
        _, margin = distances(row, chosen)
        lost = [weakest - row[e] for e in range(len(row)) if e not in chosen]
        level = weakest - margin / 2
        result.append(max(temperature * margin, 0.2 * sum(lost) / len(lost), 0.01 * level))
    return result


def surrogate_oracle(scores, ids, width_T):
    """Return what the gradient is the gradient of, at fixed widths."""
    num_tokens, top_k, num_experts = len(scores), len(ids[0]), len(scores[0])
    total = 0.0
    for row, chosen, width in zip(scores, ids, width_T, strict=True):
        away, _ = distances(row, chosen)
        for e in range(num_experts):
            fraction = sum(other.count(e) for other in ids) / (num_tokens * top_k)
            step = sigmoid(away[e] / width)
            total += num_experts * (fraction - 1 / num_experts) * step / (num_tokens * top_k)
    return total


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([(1, 1, 2), (5, 2, 6), (7, 1, 3), (4, 3, 4)]),
    st.sampled_from(["softmax", "sigmoid"]),
    st.sampled_from([0.1, 0.2, 0.7]),
    st.integers(0, 2**31),
)
def test_value_and_gradient_agree_with_loops(sizes, gate, temperature, seed):
    num_tokens, top_k, num_experts = sizes
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    routing = route(logits, top_k, gate=gate)
    scores, ids = routing.scores_TE.requires_grad_(), routing.expert_ids_TK
    loss = margin_balance_loss(scores, ids, temperature=temperature)
    rows, chosen = scores.tolist(), ids.tolist()
    assert loss.item() == pytest.approx(value_oracle(rows, chosen, temperature), rel=1e-10)
    (gradient,) = torch.autograd.grad(loss, scores)
    fixed = widths(rows, chosen, temperature)
    for t in range(num_tokens):
        for e in range(num_experts):
            step = 1e-6 * min(fixed[t], distances(rows[t], chosen[t])[1])
            ends = []
            for sign in (1, -1):
                moved = [list(row) for row in rows]
                moved[t][e] += sign * step
                ends.append(surrogate_oracle(moved, chosen, fixed))
            slope = (ends[0] - ends[1]) / (2 * step)
            scale = num_experts / (top_k * num_tokens * fixed[t])
            assert gradient[t, e].item() == pytest.approx(slope, rel=1e-4, abs=1e-5 * scale)


SIZES = [(1, 1, 2), (6, 1, 2), (9, 2, 8), (30, 3, 16), (64, 8, 64), (5, 1, 64), (4, 3, 3)]


def scores_of_kind(kind, num_tokens, num_experts, generator):
    uniform = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    if kind == "ties":
        return (3 * uniform).round() / 3
    if kind == "hair-thin":
        return 0.5 + 1e-12 * uniform
    if kind == "one expert":
        return torch.softmax(200 * uniform, 1)
    if kind == "a few hot, the rest equal":
        uniform[:, num_experts // 4 + 1 :] = 1.0
        return uniform
    if kind == "signed and huge":
        return 1e30 * (uniform - 0.5)
    return uniform


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(SIZES),
    st.sampled_from(
        ["any", "ties", "hair-thin", "one expert", "a few hot, the rest equal", "signed and huge"]
    ),
    st.sampled_from(["best scores", "biased", "unrelated"]),
    st.floats(0.02, 5.0),
    st.integers(0, 2**31),
)
def test_the_law_holds_for_any_scores(sizes, kind, ids_are, temperature, seed):
    num_tokens, top_k, num_experts = sizes
    generator = torch.Generator().manual_seed(seed)
    scores = scores_of_kind(kind, num_tokens, num_experts, generator)
    bias = torch.randn(num_experts, generator=generator, dtype=torch.float64)
    merit = {
        "best scores": scores,
        "biased": scores + bias,
        "unrelated": torch.rand(num_tokens, num_experts, generator=generator),
    }[ids_are]
    ids = merit.topk(top_k, dim=1).indices
    bias = bias if ids_are == "biased" else None
    loss = margin_balance_loss(scores, ids, temperature=temperature, bias_E=bias).item()
    even, eps = concentration(ids, num_experts), epsilon(temperature)
    assert even >= 1 - 1e-12
    assert loss >= (1 - eps) * even - 1e-12
    assert loss >= 1 - eps - 1e-12
    assert loss <= (1 - eps) * even + eps * num_experts / top_k + 1e-12


def differentiable_value(scores, ids, temperature):
    """Return the value with nothing held fixed: what an adversary would descend."""
    num_tokens, num_experts = scores.shape
    selected = torch.zeros(num_tokens, num_experts).scatter_(1, ids, 1.0) > 0
    weakest = torch.where(selected, scores, math.inf).amin(1, keepdim=True)
    strongest = torch.where(selected, -math.inf, scores).amax(1, keepdim=True)
    step = torch.sigmoid(
        (scores - torch.where(selected, strongest, weakest)) / (temperature * (weakest - strongest))
    )
    fraction = selected.double().mean(0) / ids.shape[1]
    return num_experts / ids.shape[1] * (fraction * step.mean(0)).sum()


def winning(logits, lead, ids):
    """Return scores of which the given ids are always the best, by a hair or by a lot."""
    scores = torch.softmax(logits, 1)
    selected = torch.zeros_like(scores).scatter(1, ids, 1.0) > 0
    best_other = torch.where(selected, 0.0, scores).amax(1, keepdim=True)
    scores = torch.where(selected, best_other * (1 + 1e-9 + F.softplus(lead)), scores)
    return scores / scores.sum(1, keepdim=True)


@pytest.mark.parametrize("goal", ["margin loss", "its value in full", "balance loss"])
@pytest.mark.parametrize("seed", [0, 1])
def test_descent_finds_no_counterexample(goal, seed):
    num_tokens, num_experts, top_k, temperature = 24, 8, 2, 0.3
    generator = torch.Generator().manual_seed(seed)
    hot = torch.linspace(2, -2, num_experts, dtype=torch.float64)
    logits = hot + torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    ids = logits.topk(top_k, dim=1).indices
    lead = torch.zeros_like(logits)
    logits, lead = logits.requires_grad_(), lead.requires_grad_()
    adam = torch.optim.Adam([logits, lead], lr=0.1)
    bound = (1 - epsilon(temperature)) * concentration(ids, num_experts)
    ordinary = math.inf
    for _ in range(150):
        scores = winning(logits, lead, ids)
        loss = margin_balance_loss(scores, ids, temperature=temperature)
        assert loss.item() >= bound - 1e-9
        ordinary = balance_loss(scores, ids)
        goals = {
            "margin loss": loss,
            "its value in full": differentiable_value(scores, ids, temperature),
            "balance loss": ordinary,
        }
        adam.zero_grad()
        goals[goal].backward()
        adam.step()
    if goal == "balance loss":
        assert ordinary < 0.9  # the same adversary does win against the ordinary loss


def test_the_report_tables_that_fool_the_ordinary_loss():
    # Two experts, 2 and 4 tokens of 6: E sum f^2 = 2 (1/9 + 4/9).
    six = torch.tensor([[1.0, 0.0]] * 2 + [[0.4, 0.6]] * 4)
    six_ids = torch.tensor([[0]] * 2 + [[1]] * 4)
    # 1 : 3 by a hair: 2 (1/16 + 9/16).
    hair = torch.tensor([[1.0, 0.0]] * 2 + [[0.499999, 0.500001]] * 6)
    hair_ids = torch.tensor([[0]] * 2 + [[1]] * 6)
    # 16 of 64 experts take all routes in turn, 4 a token, by a hair: E / A.
    few_ids = (torch.arange(16)[:, None] + torch.arange(4)) % 16
    few = torch.cat([torch.zeros(16, 16), torch.ones(16, 48)], 1).scatter(1, few_ids, 1.000001)
    for scores, ids, limit in ((six, six_ids, 10 / 9), (hair, hair_ids, 5 / 4), (few, few_ids, 4)):
        assert balance_loss(scores, ids) < 0.95
        for temperature in (0.05, 0.2):
            loss = margin_balance_loss(scores, ids, temperature=temperature).item()
            assert (1 - epsilon(temperature)) * limit - 1e-6 <= loss
            if temperature == 0.05:
                assert loss == pytest.approx(limit, rel=1e-5)


def test_a_fixed_width_would_bring_the_game_back():
    # The trap: by a hair, losers count as half winners when the width does not follow the margin.
    scores = torch.tensor([[1.0, 0.0]] * 2 + [[0.499999, 0.500001]] * 6)
    ids = torch.tensor([[0]] * 2 + [[1]] * 6)
    distance = scores - scores.flip(1)
    fraction = torch.tensor([0.25, 0.75])
    fixed = 2 * (fraction * torch.sigmoid(distance / 0.05).mean(0)).sum()
    assert fixed.item() == pytest.approx(7 / 8, rel=1e-4)
    assert margin_balance_loss(scores, ids) > 1.2


def test_mass_that_never_wins_buys_nothing():
    # Mass moves from the winners to experts that nobody selects, until the lead is a hair.
    ids = torch.tensor([[0]] * 3 + [[1]] * 1)
    lead = torch.nn.functional.one_hot(ids[:, 0], 6).double()
    values, ordinary = [], []
    for share in (0.0, 0.5, 0.99, 0.999999):
        scores = (1 - share) * lead + share / 6
        values.append(margin_balance_loss(scores, ids).item())
        ordinary.append(balance_loss(scores, ids).item())
    assert ordinary[-1] < 1.001 < ordinary[0]
    assert min(values) == pytest.approx(max(values), rel=1e-9)
    assert values[0] >= (1 - epsilon(0.2)) * 6 * 10 / 16


def test_the_gradient_pushes_marginal_tokens_off_an_overloaded_expert():
    # Expert 0 has six of eight tokens, won by ever more.
    margins = torch.tensor([0.001, 0.01, 0.05, 0.2, 0.4, 0.8], dtype=torch.float64)
    scores = torch.stack([0.5 + margins / 2, 0.5 - margins / 2], 1)
    scores = torch.cat([scores, torch.tensor([[0.1, 0.9]] * 2)]).requires_grad_()
    ids = scores.argmax(1, keepdim=True)
    margin_balance_loss(scores, ids).backward()
    assert scores.grad is not None
    push = scores.grad[:6, 0]
    assert (push > 0).all()
    assert (push.diff() < 0).all()  # the thinner the margin, the harder
    assert push[0] > 20 * push[-1]
    torch.testing.assert_close(scores.grad.sum(1), torch.zeros(8, dtype=torch.float64))
    moved = (scores - 1e-3 * scores.grad).detach()
    assert moved.argmax(1).bincount().tolist() == [5, 3]  # the most marginal one left first


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SIZES), st.integers(-12, 0), st.integers(0, 2**31))
def test_the_gradient_is_bounded_however_thin_the_margins(sizes, exponent, seed):
    num_tokens, top_k, num_experts = sizes
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    scores = (0.5 + 10.0**exponent * (noise - 0.5)).requires_grad_()
    best, ids = scores.detach().topk(min(top_k + 1, num_experts), dim=1)
    (gradient,) = torch.autograd.grad(margin_balance_loss(scores, ids[:, :top_k]), scores)
    level = best[:, -2:].mean(1, keepdim=True)
    apart = (best[:, top_k - 1 : top_k] - scores.detach()).clamp(min=0)
    spread = apart.sum(1, keepdim=True) / max(num_experts - top_k, 1)
    bound = 2.5 * num_experts / (top_k * num_tokens * torch.maximum(spread, level / 20))
    assert (gradient.abs() <= bound * (1 + 1e-9)).all()
    assert gradient.sum(1).abs().max() < 1e-9


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(9, 2, 8), (30, 3, 16), (16, 8, 64)]),
    st.floats(-0.9, 1.0),
    st.floats(-3, 3),
    st.integers(0, 2**31),
)
def test_shifted_and_stretched_scores_are_the_same_game(sizes, shift, exponent, seed):
    """Where no token's scores lie so near to each other that the least width holds its step."""
    num_tokens, top_k, num_experts = sizes
    generator = torch.Generator().manual_seed(seed)
    scores = 1 + torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    best, ids = scores.topk(top_k + 1, dim=1)
    spread = (best[:, top_k - 1 :][:, :1] - scores).clamp(min=0).sum(1) / (num_experts - top_k)
    level = best[:, -2:].mean(1) + max(shift, 0.0)
    assume(bool((spread > level / 20).all()))  # the least width over that of the spread
    ids = ids[:, :top_k]
    stretch = 10.0**exponent
    other = (stretch * (scores + shift)).requires_grad_()
    loss = margin_balance_loss(scores.requires_grad_(), ids)
    moved = margin_balance_loss(other, ids)
    torch.testing.assert_close(moved, loss, rtol=1e-9, atol=0)
    (want,), (got,) = torch.autograd.grad(loss, scores), torch.autograd.grad(moved, other)
    torch.testing.assert_close(stretch * got, want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_a_router_whose_logits_shrink_is_pushed_at_the_same_tokens(gate):
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(256, 16, generator=generator, dtype=torch.float64)
    logits += torch.linspace(0.5, -0.5, 16, dtype=torch.float64)

    def push(scale):
        z = (scale * logits).requires_grad_()
        routing = route(z, 2, gate=gate)
        loss = margin_balance_loss(routing.scores_TE, routing.expert_ids_TK)
        return torch.autograd.grad(loss, z)[0]

    shrunk, smaller = push(0.3), push(0.15)
    assert F.cosine_similarity(shrunk.flatten(), smaller.flatten(), dim=0) > 0.99
    # Twice as near to each other, they need half the way.
    assert smaller.norm() / shrunk.norm() == pytest.approx(2, rel=0.1)
    # An expert far from the decision is not pushed as one at it is.
    depth = logits.topk(2, dim=1).values[:, 1:] - logits
    far, near = shrunk[depth > 3].abs().mean(), shrunk[(depth > 0) & (depth < 0.3)].abs().mean()
    assert near > 10 * far


def test_even_loads_get_no_gradient():
    scores = torch.rand(12, 4, generator=torch.Generator().manual_seed(3)).requires_grad_()
    ids = torch.stack([torch.arange(12) % 4, (torch.arange(12) + 1) % 4], 1)
    loss = margin_balance_loss(scores, ids)
    (gradient,) = torch.autograd.grad(loss, scores)
    assert torch.equal(gradient, torch.zeros(12, 4))


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scale", [1.0, 0.02])
def test_descent_reduces_the_worst_load_and_revives_the_dead(gate, scale):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 16, generator=generator)
    x[:, 0] = x[:, 0].abs() + 1
    router = Router(16, 16, 2, gate=gate)
    with torch.no_grad():
        router.weight_ED.copy_(torch.randn(16, 16, generator=generator) / 4)
        router.weight_ED[:, 0] += torch.linspace(2.5, -2.5, 16)
        router.weight_ED.mul_(scale)
    adam = torch.optim.Adam(router.parameters(), lr=0.02)

    def loads():
        counts = router(x).counts_E.double()
        return (counts.max() / counts.mean()).item(), int((counts == 0).sum())

    worst, dead = loads()
    assert worst > 5
    assert dead >= 4
    for _ in range(200):
        routing = router(x)
        adam.zero_grad()
        margin_balance_loss(routing.scores_TE, routing.expert_ids_TK).backward()
        adam.step()
    worst, dead = loads()
    assert worst < 1.15
    assert dead == 0
