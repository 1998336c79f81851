"""From admitted counts to the routes that are kept: the law between `admit` and `keep_routes`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_routing import Router, admit, keep_routes, measure_balance, plan_rows


def random_ids(num_tokens, num_experts, top_k, seed, absent=0.2):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k]
    drop = torch.rand(num_tokens, top_k, generator=generator) < absent
    return ids.masked_fill(drop, -1)


def counts_of(ids, num_experts):
    return (ids[..., None] == torch.arange(num_experts)).sum((0, 1))


SIZES = st.sampled_from([(0, 3, 1), (1, 1, 1), (7, 4, 2), (33, 6, 6), (50, 12, 3)])


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(0, 2**31), st.sampled_from([0, 1, 3, 9]))
def test_keeps_the_first_routes_of_each_expert(sizes, seed, most):
    T, E, K = sizes
    ids = random_ids(T, E, K, seed)
    kept_E = torch.randint(0, most + 1, (E,), generator=torch.Generator().manual_seed(seed))
    room, expected = kept_E.tolist(), []
    for row in ids.tolist():
        expected.append([])
        for expert in row:
            fits = expert >= 0 and room[expert] > 0
            room[expert] -= fits
            expected[-1].append(expert if fits else -1)
    assert keep_routes(ids, kept_E.to(torch.int32)).tolist() == expected
    assert keep_routes(ids, kept_E).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(1, 1, 4), (3, 2, 2), (2, 4, 1)]),
    st.integers(0, 2**31),
    st.sampled_from([0, 1, 5, 17, 10**6]),
    st.sampled_from(["fair", "tail"]),
)
def test_every_source_keeps_what_was_admitted_and_the_rooms_hold_it(shape, seed, capacity, policy):
    S, Q, local = shape
    E = Q * local
    sources = [random_ids(11 + s, E, min(2, E), seed + s) for s in range(S)]
    requested = torch.stack([counts_of(ids, E).view(Q, local) for ids in sources])
    kept = admit(requested, capacity, policy=policy)
    rows_Q = torch.zeros(Q, dtype=torch.int64)
    for s, ids in enumerate(sources):
        kept_ids = keep_routes(ids, kept[s].flatten())
        assert torch.equal(counts_of(kept_ids, E), kept[s].flatten())
        assert ((kept_ids == ids) | (kept_ids == -1)).all()
        rows_Q += counts_of(kept_ids, E).view(Q, local).sum(1)
        for align in (1, 8):
            plan = plan_rows(kept_ids, E, align=align)
            assert torch.equal(plan.rows_TK < 0, kept_ids < 0)
            assert (plan.routes_R >= 0).sum() == kept[s].sum()
        report = measure_balance(torch.rand(*ids.shape[:1], E), ids, kept_ids_TK=kept_ids)
        lost = 1 - kept[s].sum() / requested[s].sum().clamp(min=1)
        if requested[s].sum():
            assert report.dropped_routes.item() == pytest.approx(lost.item(), abs=1e-6)
    assert torch.equal(rows_Q, requested.sum((0, 2)).clamp(max=capacity))


def test_one_rank_shares_its_room_or_gives_each_expert_its_own():
    torch.manual_seed(0)
    routing = Router(4, 8, 2)(torch.randn(40, 4))
    counts = routing.counts_E
    shared = admit(counts.view(1, 1, 8), 50)[0].flatten()
    assert counts_of(keep_routes(routing.expert_ids_TK, shared), 8).sum() == 50
    own = admit(counts.view(1, 8, 1), 6)[0].flatten()
    kept_ids = keep_routes(routing.expert_ids_TK, own)
    assert torch.equal(counts_of(kept_ids, 8), counts.clamp(max=6).long())
    # Counts beyond what there is keep everything.
    assert torch.equal(keep_routes(routing.expert_ids_TK, counts * 2), routing.expert_ids_TK)
    assert torch.equal(keep_routes(routing.expert_ids_TK, torch.full((8,), 6)), kept_ids)


@pytest.mark.parametrize(
    ("ids", "kept", "error", "message"),
    [
        (torch.zeros(3, 1).int(), torch.ones(2).long(), TypeError, r"got torch.int32; call `.long"),
        (torch.zeros(3, 1).long(), torch.ones(2), TypeError, "must be int32 or int64, got torch.f"),
        (torch.zeros(3, 1).long(), [1, 2], TypeError, "`kept_counts_E` must be a tensor, got list"),
        (torch.zeros(3, 1).long(), torch.ones(1, 2).long(), ValueError, r"\(1, 2\); of a table"),
        (torch.zeros(3, 1).long(), torch.ones(0).long(), ValueError, "one count an expert"),
        (torch.zeros(3, 1).long(), -torch.ones(2).long(), ValueError, "must not be negative, got"),
        (torch.full((3, 1), 2), torch.ones(2).long(), ValueError, r"must be in \[-1, 2\)"),
        (torch.zeros(3, 1).long(), torch.ones(2, device="meta").long(), ValueError, "must be on c"),
    ],
)
def test_messages(ids, kept, error, message):
    with pytest.raises(error, match=message):
        keep_routes(ids, kept)
