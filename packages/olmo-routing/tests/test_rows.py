"""Row plans against a loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_routing import plan_rows


def oracle(ids_TK, num_experts, align):
    """Return the ends, the row of each flat route and the route of each row, padding included."""
    flat = [e for row in ids_TK for e in row]
    ends, rows, routes = [], [-1] * len(flat), []
    for expert in range(num_experts):
        for route, chosen in enumerate(flat):
            if chosen == expert:
                rows[route] = len(routes)
                routes.append(route)
        while len(routes) % align:
            routes.append(-1)
        ends.append(len(routes))
    return ends, rows, routes


@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.sampled_from([0, 1, 2, 7, 13]),
    top_k=st.integers(1, 3),
    num_experts=st.sampled_from([3, 5, 11]),
    align=st.sampled_from([1, 2, 3, 32]),
    skew=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 2**31),
)
def test_agrees_with_a_loop(num_tokens, top_k, num_experts, align, skew, seed):
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(num_tokens, num_experts, generator=generator)
    draws[:, 0] += skew  # everyone takes expert 0
    ids = draws.topk(top_k, dim=1).indices
    ids[torch.rand(num_tokens, top_k, generator=generator) < 0.25] = -1
    ends, rows, routes = oracle(ids.tolist(), num_experts, align)
    plan = plan_rows(ids, num_experts, align=align)
    assert plan.offsets_E.tolist() == ends
    assert plan.rows_TK.flatten().tolist() == rows
    assert plan.rows_TK.shape == ids.shape
    capacity = num_tokens * top_k + num_experts * (align - 1)
    assert plan.routes_R.tolist() == routes + [-1] * (capacity - len(routes))
    assert plan.offsets_E.dtype == torch.int32
    assert plan.rows_TK.dtype == plan.routes_R.dtype == torch.int64


def test_rows_and_routes_are_each_others_inverse():
    ids = torch.rand(64, 9).topk(3, dim=1).indices
    plan = plan_rows(ids, 9, align=8)
    assert torch.equal(plan.routes_R[plan.rows_TK.flatten()], torch.arange(64 * 3))


def test_no_route_at_all():
    plan = plan_rows(torch.full((5, 2), -1), 3, align=4)
    assert plan.offsets_E.tolist() == [0, 0, 0]
    assert (plan.rows_TK == -1).all()
    assert plan.routes_R.tolist() == [-1] * (10 + 9)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"expert_ids_TK": torch.tensor([[3]])}, ValueError, r"must be in \[-1, 3\), .* 3 to 3"),
        ({"expert_ids_TK": torch.tensor([[-2]])}, ValueError, r"must be in \[-1, 3\), .* -2 to -2"),
        ({"expert_ids_TK": torch.tensor([0])}, ValueError, r"must have shape \(tokens, experts"),
        ({"expert_ids_TK": torch.tensor([[0.0]])}, TypeError, "must be int64, got torch.float32"),
        ({"num_experts": 0}, ValueError, "`num_experts` must be at least 1, got 0"),
        ({"align": 0}, ValueError, "`align` must be at least 1, got 0"),
        (
            {"align": 2**31},
            ValueError,
            r"at most 2\^31 - 1, .* room for 6442450942; give fewer",
        ),
        ({"align": 2**62}, ValueError, r"The rows must be at most 2\^31 - 1"),
    ],
)
def test_messages(arguments, error, message):
    with pytest.raises(error, match=message):
        plan_rows(**{"expert_ids_TK": torch.tensor([[0]]), "num_experts": 3, **arguments})
