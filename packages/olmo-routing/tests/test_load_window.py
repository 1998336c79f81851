"""The scopes of a balance loss, and that a coefficient means the same however a batch is cut."""

import pytest
import torch
import torch.distributed as dist
from olmo_routing import (
    LoadWindow,
    balance_loss,
    margin_balance_loss,
    measure_balance,
    route,
    route_fractions,
    router_z_loss,
)

LOSSES = [balance_loss, margin_balance_loss]


def skewed(num_tokens, num_experts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    return logits + torch.linspace(1, -1, num_experts)


def test_the_online_form_is_equation_32():
    logits, num_experts, top_k = skewed(17, 5), 5, 2
    mask = torch.rand(17, generator=torch.Generator().manual_seed(1)) < 0.8
    window, counts, tokens = LoadWindow(num_experts), [0] * num_experts, 0
    for part, valid in zip(logits.tensor_split(4), mask.tensor_split(4), strict=True):
        routing = route(part, top_k)
        fractions = window.add(routing.expert_ids_TK, mask_T=valid)
        for row in routing.expert_ids_TK[valid].tolist():
            for expert in row:
                counts[expert] += 1
        tokens += int(valid.sum())
        expected = [count / (top_k * tokens) for count in counts]
        assert fractions.tolist() == [pytest.approx(expected, rel=1e-12)]
        loss = balance_loss(
            routing.scores_TE, routing.expert_ids_TK, mask_T=valid, fractions_BE=fractions
        )
        mass = routing.scores_TE[valid].mean(0).tolist()
        online = num_experts * sum(f * p for f, p in zip(expected, mass, strict=True))
        assert loss.item() == pytest.approx(online, rel=1e-12)
    window.reset()
    assert window.add(torch.tensor([[0, 1]])).tolist() == [[0.5, 0.5, 0.0, 0.0, 0.0]]


def test_fractions_by_hand():
    ids = torch.tensor([[0, 1], [0, -1], [2, 0], [1, 2]])
    mask = torch.tensor([1, 1, 0, 1]).bool()
    assert route_fractions(ids, 3).tolist() == [[3 / 8, 2 / 8, 2 / 8]]
    assert route_fractions(ids, 3, mask_T=mask).tolist() == [[2 / 6, 2 / 6, 1 / 6]]
    assert route_fractions(ids, 3, mask_T=mask, num_sequences=2).tolist() == [
        [2 / 4, 1 / 4, 0.0],
        [0.0, 1 / 2, 1 / 2],
    ]
    assert route_fractions(ids, 3, mask_T=mask & False).tolist() == [[0.0, 0.0, 0.0]]
    assert route_fractions(ids[:0], 3, num_sequences=2).tolist() == [[0.0] * 3] * 2


def test_as_many_tokens_as_experts_mask_the_right_axis():
    # Rows to C, A, B with the last one padding: a mask along the experts would drop C instead.
    ids, mask = torch.tensor([[2], [0], [1]]), torch.tensor([1, 1, 0]).bool()
    assert route_fractions(ids, 3, mask_T=mask).tolist() == [[0.5, 0.0, 0.5]]
    report = measure_balance(torch.eye(3)[[2, 0, 1]], ids, mask_T=mask)
    assert report.dead_experts == 1
    assert report.balance_loss.item() == pytest.approx(1.5)


@pytest.mark.parametrize("loss_of", LOSSES)
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_own_fractions_given_are_no_fractions_given(loss_of, num_sequences):
    routing = route(skewed(12, 6), 2)
    mask = torch.arange(12) % 5 > 0
    fractions = route_fractions(routing.expert_ids_TK, 6, mask_T=mask, num_sequences=num_sequences)
    pair = routing.scores_TE, routing.expert_ids_TK
    options = {"mask_T": mask, "num_sequences": num_sequences}
    torch.testing.assert_close(
        loss_of(*pair, **options, fractions_BE=fractions), loss_of(*pair, **options)
    )


def summed(loss_of, logits, mask, cuts, form):
    """Return the sum over the parts of share times loss, and its gradient."""
    logits = logits.clone().requires_grad_()
    whole = route_fractions(route(logits, 2).expert_ids_TK, 6, mask_T=mask)
    window, total = LoadWindow(6), torch.zeros((), dtype=torch.float64)
    for part, valid in zip(logits.tensor_split(cuts), mask.tensor_split(cuts), strict=True):
        routing = route(part, 2)
        online = window.add(routing.expert_ids_TK, mask_T=valid)
        fractions = {"synchronised": whole, "online": online, "microbatch": None}[form]
        pair = routing.scores_TE, routing.expert_ids_TK
        loss = loss_of(*pair, mask_T=valid, fractions_BE=fractions)
        loss = loss + router_z_loss(routing.logits_TE, mask_T=valid)
        total = total + valid.sum().double() / mask.sum() * loss
    return total.detach(), torch.autograd.grad(total, logits)[0]


@pytest.mark.parametrize("loss_of", LOSSES)
@pytest.mark.parametrize("cuts", [[12], [6, 12, 18], [5, 6, 20]])
def test_synchronised_parts_sum_to_the_loss_of_the_whole(loss_of, cuts):
    logits = skewed(24, 6)
    mask = torch.rand(24, generator=torch.Generator().manual_seed(3)) < 0.7
    expected = summed(loss_of, logits, mask, [], "microbatch")
    got = summed(loss_of, logits, mask, cuts, "synchronised")
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss_of", LOSSES)
@pytest.mark.parametrize("form", ["microbatch", "online", "synchronised"])
@pytest.mark.parametrize("copies", [2, 4, 8])
def test_identical_microbatches_weigh_as_one_in_every_form(loss_of, form, copies):
    logits, mask = skewed(7, 6), torch.arange(7) % 4 > 0
    value, gradient = summed(loss_of, logits, mask, [], form)
    cuts = [7 * copy for copy in range(1, copies)]
    got, parts = summed(loss_of, logits.repeat(copies, 1), mask.repeat(copies), cuts, form)
    torch.testing.assert_close(got, value, rtol=1e-12, atol=0)
    torch.testing.assert_close(parts.view(copies, 7, 6).sum(0), gradient, rtol=1e-10, atol=1e-14)
    assert gradient.abs().sum() > 1e-3


@pytest.mark.parametrize("loss_of", LOSSES)
def test_the_value_of_uniform_and_collapsed_routing(loss_of):
    even = torch.full((8, 8), 1 / 8)
    in_turn = torch.stack([torch.arange(8), (torch.arange(8) + 1) % 8], dim=1)
    same_two = torch.full((8, 8), 1e-9)
    same_two[:, 2:4] = 0.5
    ids = torch.tensor([[2, 3]] * 8)
    options = {"temperature": 0.05} if loss_of is margin_balance_loss else {}
    assert loss_of(even, in_turn, **options).item() == pytest.approx(1.0, rel=1e-6)
    assert loss_of(same_two, ids, **options).item() == pytest.approx(4.0, rel=1e-6)
    # Kept apart, opposite imbalances do not cancel.
    scores, opposite = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0], [1]])
    assert loss_of(scores, opposite, **options).item() == pytest.approx(1.0)
    assert loss_of(scores, opposite, num_sequences=2, **options).item() == pytest.approx(2.0)


@pytest.mark.parametrize("loss_of", LOSSES)
def test_the_gradient_is_linear_in_the_coefficient_and_not_zero(loss_of):
    logits = skewed(12, 6).requires_grad_()
    routing = route(logits, 2)
    loss = loss_of(routing.scores_TE, routing.expert_ids_TK)
    one, three = (
        torch.autograd.grad(scale * loss, logits, retain_graph=True)[0] for scale in (1.0, 3.0)
    )
    assert one.abs().sum() > 1e-3
    torch.testing.assert_close(three, 3 * one)


def _loss_of_each_rank(rank, world, name, form, parts):
    """Return this rank's weighted loss and gradient; every rank holds a part of each sequence."""
    loss_of = {"balance": balance_loss, "margin": margin_balance_loss}[name]
    logits = torch.tensor(parts[rank][0], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor(parts[rank][1])
    routing = route(logits, 2)
    sequences = 2 if form == "context" else 1
    ids, group = routing.expert_ids_TK, dist.group.WORLD
    if form == "window":
        fractions = LoadWindow(4).add(ids, mask_T=mask, group=group)
    else:
        fractions = route_fractions(ids, 4, mask_T=mask, num_sequences=sequences, group=group)
    tokens = mask.sum().double()
    dist.all_reduce(tokens)
    loss = loss_of(
        routing.scores_TE, ids, mask_T=mask, num_sequences=sequences, fractions_BE=fractions
    )
    loss = mask.sum() / tokens * loss
    (gradient,) = torch.autograd.grad(loss, logits)
    return loss.item(), gradient.tolist()


@pytest.mark.dist
@pytest.mark.parametrize("name", ["balance", "margin"])
@pytest.mark.parametrize("form", ["data", "window", "context"])
def test_ranks_sum_to_the_loss_of_one(processes, name, form):
    # Two sequences of 6 tokens. Data ranks hold one each; context ranks hold a half of both.
    loss_of = {"balance": balance_loss, "margin": margin_balance_loss}[name]
    logits = skewed(12, 4)
    mask = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0]).bool()
    index = torch.arange(12)
    ranks = (
        [torch.cat([index[0:3], index[6:9]]), torch.cat([index[3:6], index[9:12]])]
        if form == "context"
        else [index[:6], index[6:]]
    )
    parts = [(logits[rank].tolist(), mask[rank].tolist()) for rank in ranks]
    results = processes.run(_loss_of_each_rank, name, form, parts, world=2)
    whole = logits.clone().requires_grad_()
    routing = route(whole, 2)
    loss = loss_of(
        routing.scores_TE,
        routing.expert_ids_TK,
        mask_T=mask,
        num_sequences=2 if form == "context" else 1,
    )
    assert sum(value for value, _ in results) == pytest.approx(loss.item(), rel=1e-10)
    (expected,) = torch.autograd.grad(loss, whole)
    for rank, (_, gradient) in zip(ranks, results, strict=True):
        torch.testing.assert_close(torch.tensor(gradient).double(), expected[rank])


def test_messages():
    ids = torch.zeros(6, 2).long()
    with pytest.raises(ValueError, match="`num_experts` must be at least 1, got 0"):
        LoadWindow(0)
    with pytest.raises(ValueError, match=r"`expert_ids_TK` must be in \[-1, 3\)"):
        LoadWindow(3).add(ids + 3)
    with pytest.raises(ValueError, match=r"`mask_T` must have shape \(6,\)"):
        route_fractions(ids, 3, mask_T=torch.ones(5).bool())
    with pytest.raises(ValueError, match="`num_sequences` must divide the 6 tokens, got 4"):
        route_fractions(ids, 3, num_sequences=4)
    with pytest.raises(ValueError, match=r"`fractions_BE` must have shape .* = \(2, 3\) on cpu"):
        balance_loss(torch.ones(6, 3), ids, num_sequences=2, fractions_BE=torch.ones(1, 3))
    with pytest.raises(TypeError, match="`fractions_BE` must be a floating-point tensor"):
        balance_loss(torch.ones(6, 3), ids, fractions_BE=torch.ones(1, 3).long())
