"""Admission: what both policies keep, and where their drops fall."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_routing import admit

TABLES = st.builds(
    lambda shape, scale, seed: torch.randint(
        0, scale + 1, shape, generator=torch.Generator().manual_seed(seed)
    ),
    st.sampled_from([(1, 1, 1), (1, 3, 5), (4, 2, 3), (3, 3, 1), (5, 1, 7)]),
    st.sampled_from([0, 1, 9, 100000]),
    st.integers(0, 2**31),
)
CAPACITIES = st.sampled_from([0, 1, 2, 7, 23, 100000, 10**9])


@settings(max_examples=60, deadline=None)
@given(TABLES, CAPACITIES)
def test_both_policies_fill_the_room_and_no_more(requested, capacity):
    totals = requested.sum((0, 2))
    for policy in ("fair", "tail"):
        kept = admit(requested, capacity, policy=policy)
        assert (kept >= 0).all()
        assert (kept <= requested).all()
        assert torch.equal(kept.sum((0, 2)), totals.clamp(max=capacity))


@settings(max_examples=40, deadline=None)
@given(TABLES, CAPACITIES)
def test_tail_keeps_rows_in_their_order(requested, capacity):
    kept = admit(requested, capacity, policy="tail")
    for q in range(requested.shape[1]):
        room = capacity
        for e in range(requested.shape[2]):
            for s in range(requested.shape[0]):
                take = min(room, int(requested[s, q, e]))
                assert kept[s, q, e] == take
                room -= take


@settings(max_examples=40, deadline=None)
@given(TABLES, CAPACITIES)
def test_fair_keeps_every_cell_and_every_expert_within_one_of_its_share(requested, capacity):
    kept = admit(requested, capacity, policy="fair")
    for q in range(requested.shape[1]):
        total = int(requested[:, q].sum())
        share = Fraction(min(total, capacity), max(total, 1))
        for e in range(requested.shape[2]):
            asked, got = requested[:, q, e].tolist(), kept[:, q, e].tolist()
            assert abs(sum(got) - share * sum(asked)) < 1
            assert all(abs(g - share * a) < 1 for g, a in zip(got, asked, strict=True))


def test_drops_do_not_gather_at_the_last_experts():
    requested = torch.ones(4, 1, 8, dtype=torch.int32)  # 32 equal requests for 16 rows
    assert admit(requested, 16, policy="fair").sum(0)[0].tolist() == [2] * 8
    assert admit(requested, 16, policy="tail").sum(0)[0].tolist() == [4] * 4 + [0] * 4


def test_neither_end_of_the_order_is_favoured():
    # Rounding the running share down would always give the last cell the only row.
    assert admit(torch.ones(1, 1, 3, dtype=torch.int32), 1).tolist() == [[[0, 1, 0]]]


def test_destinations_do_not_share_their_room():
    requested = torch.tensor([[[8, 2], [1, 1]]])  # one source, two destinations
    assert admit(requested, 5, policy="tail").tolist() == [[[5, 0], [1, 1]]]
    assert admit(requested, 5).tolist() == [[[4, 1], [1, 1]]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_beyond_32_bits_in_between(dtype):
    requested = torch.full((2, 1, 2), 500_000_000, dtype=dtype)
    kept = admit(requested, 1_000_000_000)
    assert kept.dtype == dtype
    assert kept.tolist() == [[[250_000_000] * 2]] * 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"capacity": -1}, ValueError, "`capacity` must be at least 0, got -1"),
        ({"capacity": 1.5}, TypeError, "`capacity` must be an int, got float"),
        ({"policy": "head"}, ValueError, r"`policy` must be one of \('fair', 'tail'\), got 'head'"),
        ({"requested_SQE": torch.ones(1, 1, 1)}, TypeError, "must be int32 or int64, got"),
        ({"requested_SQE": torch.ones(1, 1).int()}, ValueError, r"three dimensions .*\(1, 1\)"),
        ({"requested_SQE": torch.ones(1, 0, 2).int()}, ValueError, r"none empty, got \(1, 0, 2\)"),
        ({"requested_SQE": torch.ones(4).int()}, ValueError, r"give `counts_E.view\(1, 1, -1\)`"),
        ({"requested_SQE": [[[1]]]}, TypeError, "`requested_SQE` must be a tensor, got list"),
        ({"requested_SQE": -torch.ones(1, 1, 1).int()}, ValueError, "not be negative, got -1"),
        ({"capacity": 2**31}, ValueError, "`capacity` must be at most 2147483647, got 2147483648"),
        ({"capacity": 2**63}, ValueError, "`capacity` must be at most 2147483647, got"),
        ({"capacity": 2**64}, ValueError, "`capacity` must be at most 2147483647, got"),
    ],
)
def test_messages(arguments, error, message):
    given_ = {"requested_SQE": torch.ones(1, 1, 1).int(), "capacity": 1}
    with pytest.raises(error, match=message):
        admit(**{**given_, **arguments})


@pytest.mark.parametrize("policy", ["fair", "tail"])
def test_sums_are_right_up_to_their_limit_and_refused_beyond(policy):
    most = 2**31 - 1
    at_limit = torch.tensor([[[most - 1, 1]], [[0, 0]]])
    for capacity in (0, 1, most // 2, most - 1, most):
        kept = admit(at_limit, capacity, policy=policy)
        assert kept.sum() == capacity
        assert ((kept >= 0) & (kept <= at_limit)).all()
    # Other destinations have sums of their own; a sum that wraps in int64 is no way around.
    assert admit(torch.full((1, 3, 1), most), most, policy=policy).tolist() == [[[most]] * 3]
    for cells in ([most, 1], [2**62, 2**62, 2**62, 2**62], [2**63 - 1, 2**63 - 1, 2]):
        for shape in ((len(cells), 1, 1), (1, 1, len(cells))):
            with pytest.raises(ValueError, match=r"sum to less than 2\^31 for each destination"):
                admit(torch.tensor(cells).view(shape), 5, policy=policy)
