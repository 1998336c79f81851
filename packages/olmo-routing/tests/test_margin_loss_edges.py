"""The margin balance loss at its edges: ties, what is missing, masked, biased or not finite."""

import math

import pytest
import torch
from olmo_routing import margin_balance_loss, route


def epsilon(temperature):
    """What a margin of nothing counts for."""
    return 1 / (1 + math.exp(1 / temperature))


def concentration(ids, num_experts):
    """Return E * sum f^2, what the loss tends to."""
    counts = ids[ids >= 0].bincount(minlength=num_experts).double()
    return (num_experts * (counts / ids.numel()).square().sum()).item()


def test_exact_ties_count_as_decided_and_push_as_margins():
    scores = torch.full((4, 3), 0.25, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0], [0], [0], [1]])
    loss = margin_balance_loss(scores, ids)
    # f = (3/4, 1/4, 0); winners at 1 - eps, all others at eps.
    eps = epsilon(0.2)
    expected = 3 * (3 / 4 * (3 * (1 - eps) + eps) + 1 / 4 * (1 - eps + 3 * eps)) / 4
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    loss.backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert (scores.grad[:3, 0] > 0).all()
    assert (scores.grad[:, 2] < 0).all()  # the dead expert is pulled up


def test_every_expert_selected_is_one_without_a_gradient():
    scores = torch.rand(5, 3, requires_grad=True)
    loss = margin_balance_loss(scores, torch.arange(3).repeat(5, 1))
    assert loss.item() == pytest.approx(1.0)
    loss.backward()
    assert scores.grad is not None
    assert torch.equal(scores.grad, torch.zeros(5, 3))


def test_missing_routes_are_missing_from_both_sides():
    scores = torch.rand(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids = scores.topk(2, dim=1).indices
    ids[1, 1] = ids[2] = -1
    loss = margin_balance_loss(scores.requires_grad_(), ids)
    even, share = concentration(ids, 4), 9 / 12
    assert even >= share**2
    assert (1 - epsilon(0.2)) * even <= loss.item() <= even + epsilon(0.2) * 2
    loss.backward()
    assert scores.grad is not None
    assert torch.equal(scores.grad[2], torch.zeros(4, dtype=torch.float64))
    assert scores.grad[1].abs().sum() > 0
    nothing = margin_balance_loss(scores, torch.full((6, 2), -1))
    assert nothing.item() == 0.0
    assert torch.equal(torch.autograd.grad(nothing, scores)[0], torch.zeros_like(scores))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_count_as_zero(poison):
    clean = torch.rand(8, 5, generator=torch.Generator().manual_seed(2)) + 0.1
    clean[3] = 0.0
    clean[5, 2] = 0.0
    ids = clean.topk(2, dim=1).indices
    bad = torch.where(clean == 0, poison, clean).requires_grad_()
    clean.requires_grad_()
    loss, expected = margin_balance_loss(bad, ids), margin_balance_loss(clean, ids)
    assert torch.equal(loss, expected)
    (got,), (want,) = torch.autograd.grad(loss, bad), torch.autograd.grad(expected, clean)
    assert torch.equal(got, torch.where(bad.isfinite(), want, 0.0))
    assert torch.equal(got[3], torch.zeros(5))


def test_scores_that_vanish_break_nothing():
    logits = torch.tensor([[300.0, 0.0, -1.0], [0.0, 1.0, 400.0], [0.0, 1.0, 2.0]])
    logits.requires_grad_()
    for gate in ("softmax", "sigmoid"):
        routing = route(logits, 2, gate=gate)  # the second best softmax score underflows to 0
        loss = margin_balance_loss(routing.scores_TE, routing.expert_ids_TK)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert loss >= 1 - epsilon(0.2)
        assert gradient.isfinite().all()


def test_padding_of_anything_counts_nowhere():
    scores = torch.rand(7, 4, generator=torch.Generator().manual_seed(4))
    ids = scores.topk(2, dim=1).indices
    padded = torch.cat([scores, torch.full((5, 4), math.nan)]).requires_grad_()
    all_ids = torch.cat([ids, torch.tensor([[0, 1]] * 5)])
    loss = margin_balance_loss(padded, all_ids, mask_T=torch.arange(12) < 7)
    alone = margin_balance_loss(scores.requires_grad_(), ids)
    torch.testing.assert_close(loss, alone)
    (got,), (want,) = torch.autograd.grad(loss, padded), torch.autograd.grad(alone, scores)
    torch.testing.assert_close(got[:7], want)
    assert torch.equal(got[7:], torch.zeros(5, 4))
    ones = torch.ones(7).bool()
    assert torch.equal(margin_balance_loss(scores, ids, mask_T=ones), alone)
    nothing = margin_balance_loss(scores, ids, mask_T=~ones)
    assert nothing.item() == 0.0
    assert margin_balance_loss(scores[:0], ids[:0]).item() == 0.0


def test_permuting_tokens_or_experts_permutes_the_answer():
    generator = torch.Generator().manual_seed(6)
    scores = torch.rand(9, 6, generator=generator, dtype=torch.float64)
    scores[4] = 0.5  # ties as well
    ids = scores.topk(2, dim=1).indices
    tokens, experts = torch.randperm(9, generator=generator), torch.randperm(6, generator=generator)
    moved = scores[tokens][:, experts].requires_grad_()
    loss = margin_balance_loss(scores.requires_grad_(), ids)
    other = margin_balance_loss(moved, experts.argsort()[ids[tokens]])
    torch.testing.assert_close(loss, other)
    (plain,), (permuted,) = torch.autograd.grad(loss, scores), torch.autograd.grad(other, moved)
    torch.testing.assert_close(plain[tokens][:, experts], permuted)


def test_a_bias_moves_the_margins_with_the_selection():
    # The bias hands expert 1 a token that expert 0 would have won clearly.
    scores = torch.tensor([[0.7, 0.3]] * 4, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([0.0, 0.4 + 1e-6], dtype=torch.float64, requires_grad=True)
    ids = torch.ones(4, 1).long()
    loss = margin_balance_loss(scores, ids, bias_E=bias)
    (gradient,) = torch.autograd.grad(loss, scores)
    # A margin of 1e-6 at a spread of 0.4: slope 0.25 / 0.08 on both, E (f - 1/2) = +-1.
    expected = torch.tensor([-1.5625, 1.5625]).double()
    torch.testing.assert_close(gradient[0], expected, rtol=1e-4, atol=0)


def test_a_bias_that_bars_an_expert_leaves_the_gradient_of_the_others():
    # The common mask of minus a lot: it must not widen the steps of the experts that compete.
    generator = torch.Generator().manual_seed(7)
    scores = torch.rand(16, 5, generator=generator, dtype=torch.float64).requires_grad_()
    gradients = []
    for bar in (-3.0, -1e9, -math.inf):
        bias = torch.tensor([0.0, 0.0, bar, 0.0, 0.0], dtype=torch.float64)
        ids = (scores.detach() + bias).topk(2, dim=1).indices
        loss = margin_balance_loss(scores, ids, bias_E=bias)
        gradients.append(torch.autograd.grad(loss, scores)[0])
    assert gradients[0].abs().amax(0).count_nonzero() >= 4
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-5)


def test_precisions():
    scores = torch.rand(6, 4)
    ids = scores.topk(2, dim=1).indices
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        loss = margin_balance_loss(scores.to(dtype), ids)
        assert loss.dtype == expected
        assert loss.ndim == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"temperature": 0.0}, ValueError, "`temperature` must be positive and finite, got 0.0"),
        ({"temperature": math.inf}, ValueError, "`temperature` must be positive and finite"),
        ({"bias_E": torch.zeros(3)}, ValueError, r"`bias_E` must have shape \(4,\) on cpu, got"),
        ({"bias_E": torch.zeros(4).int()}, TypeError, "`bias_E` must be a floating-point tensor"),
        ({"num_sequences": 4}, ValueError, "`num_sequences` must divide the 6 tokens, got 4"),
        (
            {"fractions_BE": torch.ones(2, 4)},
            ValueError,
            r"`fractions_BE` must have shape \(`num_sequences`, experts\) = \(1, 4\) .* \(2, 4\)",
        ),
        (
            {"fractions_BE": torch.ones(1, 4).int()},
            TypeError,
            "`fractions_BE` must be a floating-point tensor, got torch.int32; `route_fractions`",
        ),
        ({"expert_ids_TK": torch.full((6, 2), 4)}, ValueError, r"must be in \[-1, 4\)"),
        ({"mask_T": torch.ones(6)}, TypeError, "`mask_T` must be bool"),
    ],
)
def test_messages(arguments, error, message):
    given_arguments = {
        "scores_TE": torch.ones(6, 4),
        "expert_ids_TK": torch.zeros(6, 2).long(),
        **arguments,
    }
    with pytest.raises(error, match=message):
        margin_balance_loss(**given_arguments)
