"""The losses: values, gradients, masks and scopes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_routing import balance_loss, route, router_z_loss


def balance_oracle(scores, ids, mask, num_sequences):
    """Return the balance loss by loops over Python floats."""
    length, top_k, num_experts = len(scores) // num_sequences, len(ids[0]), len(scores[0])
    total, valid_total = 0.0, 0
    for b in range(num_sequences):
        tokens = [t for t in range(b * length, (b + 1) * length) if mask[t]]
        for e in range(num_experts):
            routes = sum(ids[t].count(e) for t in tokens)
            mass = sum(scores[t][e] / sum(scores[t]) for t in tokens)
            total += num_experts * routes * mass / (top_k * max(len(tokens), 1))
        valid_total += len(tokens)
    return total / max(valid_total, 1)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(1, 1), (1, 6), (3, 4), (6, 1), (2, 5)]),
    st.sampled_from([(1, 1), (2, 3), (3, 6), (5, 5)]),
    st.sampled_from(["softmax", "sigmoid"]),
    st.integers(0, 2**31),
)
def test_agrees_with_a_loop(sequences, experts, gate, seed):
    (num_sequences, length), (top_k, num_experts) = sequences, experts
    generator = torch.Generator().manual_seed(seed)
    num_tokens = num_sequences * length
    logits = torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    mask = torch.rand(num_tokens, generator=generator) < 0.6
    routing = route(logits, top_k, gate=gate)
    ids = routing.expert_ids_TK.masked_fill(
        torch.rand(num_tokens, 1, generator=generator) < 0.1, -1
    )
    got = balance_loss(routing.scores_TE, ids, mask_T=mask, num_sequences=num_sequences)
    expected = balance_oracle(
        routing.scores_TE.tolist(), ids.tolist(), mask.tolist(), num_sequences
    )
    assert got.item() == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_known_values():
    even = torch.full((8, 8), 1 / 8)
    in_turn = torch.stack([torch.arange(8), (torch.arange(8) + 1) % 8], dim=1)
    assert balance_loss(even, in_turn).item() == pytest.approx(1.0)
    same_two = torch.zeros(8, 8)
    same_two[:, 2:4] = 0.5
    assert balance_loss(same_two, torch.tensor([[2, 3]] * 8)).item() == pytest.approx(4.0)
    assert balance_loss(even, in_turn).dtype == torch.float32
    assert balance_loss(even, in_turn).ndim == 0
    assert balance_loss(even.bfloat16(), in_turn).dtype == torch.float32


def test_opposite_imbalances_do_not_cancel_when_kept_apart():
    # Two layers (or sequences) that each use one expert look balanced when concatenated.
    scores, ids = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0], [1]])
    assert balance_loss(scores, ids).item() == 1.0
    assert balance_loss(scores, ids, num_sequences=2).item() == 2.0


def test_gradient_is_exact_and_reaches_the_logits():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, 4, dtype=torch.float64, generator=generator).requires_grad_()
    mask = torch.tensor([1, 1, 0, 1, 1, 1]).bool()

    def loss(x):
        routing = route(x, 2, gate="sigmoid", mask_T=mask)
        return balance_loss(routing.scores_TE, routing.expert_ids_TK, mask_T=mask, num_sequences=2)

    assert torch.autograd.gradcheck(loss, (logits,))
    (gradient,) = torch.autograd.grad(loss(logits), logits)
    assert gradient[mask].abs().sum() > 0
    assert torch.equal(gradient[~mask], torch.zeros(1, 4, dtype=torch.float64))


def test_softmax_gradient_is_the_published_formula():
    logits = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    routing = route(logits, 2)
    balance_loss(routing.scores_TE, routing.expert_ids_TK).backward()
    p, f_E = routing.scores_TE.detach(), routing.counts_E.double() / 18
    expected = 5 / 9 * p * (f_E - (p * f_E).sum(1, keepdim=True))
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, expected)


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_padding_of_anything_counts_nowhere(gate):
    logits = torch.randn(7, 4)
    mask = torch.arange(12) < 7
    padded = torch.cat([logits, torch.full((5, 4), math.nan)]).requires_grad_()
    alone, both = route(logits, 2, gate=gate), route(padded, 2, gate=gate)  # padding routed too
    scores = torch.where(mask[:, None], both.scores_TE, math.nan)
    loss = balance_loss(scores, both.expert_ids_TK, mask_T=mask)
    torch.testing.assert_close(loss, balance_loss(alone.scores_TE, alone.expert_ids_TK))
    z_loss = router_z_loss(padded, mask_T=mask)
    torch.testing.assert_close(z_loss, router_z_loss(logits))
    (loss + z_loss).backward()
    assert padded.grad is not None
    assert padded.grad.isfinite().all()
    assert torch.equal(padded.grad[7:], torch.zeros(5, 4))
    assert padded.grad[:7].abs().sum() > 0


def test_a_mask_of_ones_is_no_mask():
    routing = route(torch.randn(6, 6), 2)  # as many tokens as experts: a wrong axis would not raise
    ones = torch.ones(6).bool()
    pair = routing.scores_TE, routing.expert_ids_TK
    assert torch.equal(balance_loss(*pair, mask_T=ones), balance_loss(*pair))
    assert torch.equal(router_z_loss(pair[0], mask_T=ones), router_z_loss(pair[0]))


@pytest.mark.parametrize("num_tokens", [0, 6])
def test_nothing_real_is_zero_with_zero_gradients(num_tokens):
    logits = torch.randn(num_tokens, 4, requires_grad=True)
    mask = torch.zeros(num_tokens).bool()
    routing = route(logits, 2, mask_T=mask)
    balance = balance_loss(routing.scores_TE, routing.expert_ids_TK, mask_T=mask, num_sequences=3)
    z_loss = router_z_loss(routing.logits_TE, mask_T=mask)
    (balance + z_loss).backward()
    assert balance.item() == z_loss.item() == 0.0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(num_tokens, 4))


def test_an_empty_sequence_leaves_the_others_alone():
    logits = torch.randn(8, 4)
    mask = torch.tensor([1, 1, 0, 1, 0, 0, 0, 0]).bool()
    routing = route(logits, 2)
    pair = routing.scores_TE, routing.expert_ids_TK
    both = balance_loss(*pair, mask_T=mask, num_sequences=2)
    first = balance_loss(pair[0][:4], pair[1][:4], mask_T=mask[:4])
    torch.testing.assert_close(both, first)


@pytest.mark.parametrize("copies", [2, 4, 8])
def test_the_weight_of_a_token_does_not_depend_on_how_the_batch_is_cut(copies):
    # The same tokens again and again: the loss stays, and the copies' gradients add up to the same.
    logits = torch.randn(5, 4, requires_grad=True)

    def gradient(repeats, num_sequences):
        routing = route(logits.repeat(repeats, 1), 2)
        loss = balance_loss(routing.scores_TE, routing.expert_ids_TK, num_sequences=num_sequences)
        return torch.autograd.grad(loss + router_z_loss(routing.logits_TE), logits)[0]

    for num_sequences in (1, copies):
        torch.testing.assert_close(gradient(copies, num_sequences), gradient(1, 1))


def test_tokens_without_mass_add_nothing_and_break_nothing():
    logits = torch.tensor([[0.0, 1.0], [-95.0, -95.0], [math.nan, math.nan]], requires_grad=True)
    routing = route(logits, 1, gate="sigmoid")
    loss = balance_loss(routing.scores_TE, routing.expert_ids_TK)
    loss.backward()
    share = routing.scores_TE[0].detach() / routing.scores_TE[0].detach().sum()
    expected = 2 * (2 / 3 * share[0] + 1 / 3 * share[1]) / 3
    torch.testing.assert_close(loss.detach(), expected)
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_vanishing_scores_give_finite_gradients():
    scores = torch.tensor([[0.5, 0.5], [1e-42, 1e-42]], requires_grad=True)
    balance_loss(scores, torch.tensor([[0], [0]])).backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


def test_a_dropped_route_of_a_real_token_is_missing_from_f():
    scores, ids = torch.full((4, 2), 0.5), torch.tensor([[0], [1], [0], [-1]])
    assert balance_loss(scores, ids).item() == pytest.approx(0.75)


def test_z_loss_value_and_gradient():
    logits = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    expected = sum(math.log(sum(math.exp(z) for z in row)) ** 2 for row in logits.tolist()) / 5
    assert router_z_loss(logits).item() == pytest.approx(expected, rel=1e-12)
    mask = torch.tensor([1, 0, 1, 1, 1]).bool()
    assert torch.autograd.gradcheck(lambda x: router_z_loss(x, mask_T=mask), (logits,))
    assert router_z_loss(logits.half()).dtype == torch.float32


SCORES, IDS = torch.ones(6, 4), torch.zeros(6, 2).long()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_sequences": 4}, ValueError, "`num_sequences` must divide the 6 tokens, got 4"),
        ({"num_sequences": 0}, ValueError, "`num_sequences` must be at least 1, got 0"),
        ({"scores_TE": SCORES[:5]}, ValueError, r"one row a token of `scores_TE`.*\(6, 2\).*\(5,"),
        ({"scores_TE": SCORES[:, :1]}, ValueError, "at most one column an expert"),
        ({"scores_TE": SCORES.int()}, TypeError, "`scores_TE` must be a floating-point tensor"),
        ({"expert_ids_TK": IDS + 4}, ValueError, r"must be in \[-1, 4\)"),
        ({"expert_ids_TK": IDS.int()}, TypeError, "`expert_ids_TK` must be int64"),
        ({"mask_T": torch.ones(4).bool()}, ValueError, r"`mask_T` must have shape \(6,\)"),
        ({"mask_T": torch.ones(6)}, TypeError, "`mask_T` must be bool"),
    ],
)
def test_messages(arguments, error, message):
    with pytest.raises(error, match=message):
        balance_loss(**{"scores_TE": SCORES, "expert_ids_TK": IDS, **arguments})


def test_messages_of_z_loss():
    with pytest.raises(ValueError, match="`logits_TE` must have two dimensions"):
        router_z_loss(torch.zeros(3))
    with pytest.raises(ValueError, match=r"`mask_T` must have shape \(6,\)"):
        router_z_loss(SCORES, mask_T=torch.ones(5).bool())
