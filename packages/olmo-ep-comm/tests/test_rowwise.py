"""The one-sided exchange of virtual ranks: its plan against loops, its laws, drops and leases."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from olmo_ep_comm import LocalDispatcher, VirtualRowwise
from olmo_ep_comm._rowwise import moves
from olmo_ep_comm._rowwise.plan import count_requests, keep_requests, plan_source
from pair_codecs import MXFP8
from rowwise_problem import (
    Problem,
    assert_equal_local,
    expert_results,
    loss_of,
    run_local,
    run_virtual,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def keep_tail(requested_SQE: Tensor, capacity: int) -> Tensor:
    """Keep rows in their order until the room is used up."""
    running = requested_SQE.permute(1, 2, 0).flatten(1).cumsum(1).clamp(max=capacity)
    kept = running.diff(dim=1, prepend=torch.zeros_like(running[:, :1]))
    return kept.view(requested_SQE.permute(1, 2, 0).shape).permute(2, 0, 1)


def keep_half(requested_SQE: Tensor, capacity: int) -> Tensor:
    """Keep half of each cell, and no more than fits."""
    return keep_tail((requested_SQE + 1) // 2, capacity)


@st.composite
def problem(draw, **fixed):
    num_ranks = fixed.pop("num_ranks", None) or draw(st.sampled_from([1, 2, 3, 4]))
    num_experts = num_ranks * draw(st.integers(1, 3))
    tokens = draw(st.lists(st.integers(0, 6), min_size=num_ranks, max_size=num_ranks))
    chosen = st.lists(st.integers(-1, num_experts - 1), min_size=1, max_size=6)
    return Problem(
        tokens=tuple(tokens),
        num_experts=num_experts,
        top_k=fixed.pop("top_k", None) or draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        experts=tuple(draw(chosen)),
        seed=draw(st.integers(0, 99)),
    )


@example(case=Problem(tokens=(0, 0), num_experts=2, top_k=2))
@example(case=Problem(tokens=(6, 0, 3, 1), num_experts=8, top_k=4, experts=(7,)))
@settings(max_examples=40, deadline=None)
@given(case=problem())
def test_any_routes_equal_one_process(case):
    inputs = [case.inputs(rank) for rank in range(len(case.tokens))]
    one_addend = len(case.tokens) == 1 or case.top_k == 1
    for got, want in zip(
        run_virtual(case.virtual(), inputs), run_local(case.num_experts, inputs), strict=True
    ):
        assert_equal_local(got, want, exact=one_addend)
        assert got["dropped"] == 0
    for got, (_, ids, _) in zip(run_virtual(case.virtual(), inputs), inputs, strict=True):
        assert (got["weight gradient"][ids < 0] == 0).all()
        assert (got["y"][(ids < 0).all(1)] == 0).all()
        assert (got["x gradient"][(ids < 0).all(1)] == 0).all()


def loop_plan(case: Problem, kept: list) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Return {(source, token, slot): (rank, row)} by walking experts, sources, tokens, slots."""
    share, place = case.num_experts // len(case.tokens), {}
    for rank in range(len(case.tokens)):
        row = 0
        for local in range(share):
            for source in range(len(case.tokens)):
                left = kept[source][rank][local]
                for token, ids in enumerate(case.inputs(source)[1].tolist()):
                    for slot, expert in enumerate(ids):
                        if expert == rank * share + local and left:
                            place[source, token, slot] = (rank, row)
                            row, left = row + 1, left - 1
    return place


@settings(max_examples=40, deadline=None)
@given(case=problem(), capacity=st.integers(1, 12), policy=st.sampled_from([keep_tail, keep_half]))
def test_the_plan_is_that_of_a_loop(case, capacity, policy):
    layer = case.virtual(capacity=capacity, admit=policy)
    form = layer._buffers.settings.form
    ids = [case.inputs(rank)[1] for rank in range(form.num_ranks)]
    requested_SE = torch.stack([count_requests(value, case.num_experts) for value in ids])
    kept_SQL = keep_requests(requested_SE, form, policy)
    places = loop_plan(case, kept_SQL.tolist())
    for source, ids_TK in enumerate(ids):
        plan = plan_source(ids_TK, kept_SQL, source, form)
        assert plan.num_dropped == (ids_TK >= 0).sum() - (plan.row_TK >= 0).sum()
        for token in range(len(ids_TK)):
            heads: dict[int, list[int]] = {}
            for slot in range(case.top_k):
                rank, row = places.get((source, token, slot), (-1, -1))
                assert plan.rank_TK[token, slot] == rank
                assert plan.row_TK[token, slot] == row
                if rank >= 0:
                    heads.setdefault(rank, []).append(slot)
            assert plan.num_sums_T[token] == len(heads)
            for place, slots in enumerate(heads.values()):
                assert plan.sum_TK[token, slots[0]] == token * form.sums_a_token + place
                assert (plan.sum_TK[token, slots[1:]] == -1).all()
                for slot, following in pairwise(slots):
                    assert plan.next_TK[token, slot] == plan.row_TK[token, following]
                assert plan.next_TK[token, slots[-1]] == -1


@settings(max_examples=30, deadline=None)
@given(case=problem(), capacity=st.integers(1, 12), policy=st.sampled_from([keep_tail, keep_half]))
def test_drops_are_those_of_the_policy_and_counted(case, capacity, policy):
    """A layer with drops is a layer whose dropped routes were never asked for."""
    num_ranks = len(case.tokens)
    inputs = [case.inputs(rank) for rank in range(num_ranks)]
    requested_SE = torch.stack([count_requests(ids, case.num_experts) for _, ids, _ in inputs])
    kept = policy(requested_SE.view(num_ranks, num_ranks, -1).long(), capacity).tolist()
    places = loop_plan(case, kept)
    fewer = []
    for source, (x_TD, ids, weights_TK) in enumerate(inputs):
        is_kept = [
            [(source, token, slot) in places for slot in range(case.top_k)]
            for token in range(len(ids))
        ]
        is_kept = torch.tensor(is_kept, dtype=torch.bool).view(ids.shape)
        fewer.append((x_TD, torch.where(is_kept, ids, -1), weights_TK))
    got = run_virtual(case.virtual(capacity=capacity, admit=policy), inputs)
    want = run_virtual(case.virtual(), fewer)
    for rank in range(num_ranks):
        dropped = (inputs[rank][1] >= 0).sum() - (fewer[rank][1] >= 0).sum()
        assert got[rank].pop("dropped") == dropped
        assert got[rank]["ends"][-1] <= capacity
        for name, value in got[rank].items():
            assert torch.equal(value, want[rank][name]), name


@pytest.mark.parametrize(
    "wrong",
    [
        lambda requested, capacity: requested + 3,
        lambda requested, capacity: requested - 100,
        lambda requested, capacity: torch.full_like(requested, 1 << 40),
    ],
)
def test_a_wrong_policy_drops_or_keeps_but_never_writes_outside(wrong):
    case = Problem(tokens=(6, 6), num_experts=4, top_k=3)
    inputs = [case.inputs(rank) for rank in range(2)]
    layer = case.virtual(capacity=5, admit=wrong)
    for got, (_, ids, _) in zip(run_virtual(layer, inputs), inputs, strict=True):
        assert 0 <= got["ends"][-1] <= 5
        assert 0 <= got["dropped"] <= (ids >= 0).sum()
        assert got["y"].isfinite().all()


@pytest.mark.parametrize(
    ("kept", "got"), [(None, "NoneType"), ([[[1]]], "list"), (torch.ones(2, 2, 2), "torch.float32")]
)
def test_a_policy_that_returns_no_integers_is_refused(kept, got):
    layer = VirtualRowwise(**SIZES, capacity=5, admit=lambda requested, capacity: kept)
    x, ids, weights = torch.ones(4, 8).bfloat16(), torch.zeros(4, 2).long(), torch.ones(4, 2)
    with pytest.raises(TypeError, match=f"`admit` must return a tensor of integers, got {got}"):
        layer.dispatch([x] * 2, [ids] * 2, [weights] * 2)


def test_a_policy_of_another_shape_is_refused():
    case = Problem(tokens=(6, 6), num_experts=4, top_k=3)
    layer = case.virtual(capacity=5, admit=lambda requested, capacity: requested[0])
    inputs = [case.inputs(rank) for rank in range(2)]
    with pytest.raises(ValueError, match=r"`admit` must return .* \(2, 2, 2\), got \(2, 2\)"):
        run_virtual(layer, inputs)


@settings(max_examples=15, deadline=None)
@given(case=problem(), capacity=st.sampled_from([4, 1000]), poison=st.sampled_from([0.0, 1e30]))
def test_sums_that_are_fetched_have_the_bits_of_those_that_are_written(case, capacity, poison):
    inputs = [case.inputs(rank) for rank in range(len(case.tokens))]
    options = {"capacity": capacity, "admit": keep_half}
    want = run_virtual(case.virtual(combine_by="put", **options), inputs)
    layer = case.virtual(combine_by="get", **options)
    for own in (*layer._buffers.sums.own, *layer._buffers.weights.own):
        own.fill_(poison)
    for _ in range(2):
        for got, reference in zip(run_virtual(layer, inputs), want, strict=True):
            for name, value in reference.items():
                assert torch.equal(got[name], value), name


@settings(max_examples=15, deadline=None)
@given(case=problem())
def test_each_token_crosses_once_to_each_rank_and_each_sum_once_back(case):
    written = {"rows": 0, "sums": 0}

    class Counted:
        """The moves, with the rows written into other ranks counted by what changes there."""

        def __getattr__(self, name):
            return getattr(moves, name)

        def put_rows(self, peers, leases_R, words_TW, plan):
            for peer in peers.buffers:
                for buffer in peer.every:
                    buffer.fill_(-7)
            moves.put_rows(peers, leases_R, words_TW, plan)
            for peer in peers.buffers:
                written["rows"] += sum(int((b != -7).any(1).sum()) for b in peer.every)

        def put_sums(self, peers, y_CD, meta_C4, num_rows, form):
            for buffer in peers.every:
                buffer.fill_(float("nan"))
            moves.put_sums(peers, y_CD, meta_C4, num_rows, form)
            written["sums"] += sum(int((~b.isnan()).any(1).sum()) for b in peers.every)

    inputs = [case.inputs(rank) for rank in range(len(case.tokens))]
    layer = case.virtual(combine_by="put")
    object.__setattr__(layer._buffers.settings, "moves", Counted())
    share = case.num_experts // len(case.tokens)
    with torch.no_grad():
        sent = layer.dispatch(*map(list, zip(*inputs, strict=True)))
        layer.combine([torch.ones_like(part.rows_RD) for part in sent], sent[0].handle)
    pairs = sum(
        len({expert // share for expert in ids if expert >= 0})
        for _, ids_TK, _ in inputs
        for ids in ids_TK.tolist()
    )
    assert written == {"rows": pairs, "sums": pairs}


@settings(max_examples=15, deadline=None)
@given(
    case=problem(),
    poison=st.sampled_from([float("nan"), float("inf"), 1e30]),
    combine_by=st.sampled_from(["put", "get"]),
)
def test_undefined_memory_is_never_read(case, poison, combine_by):
    inputs = [case.inputs(rank) for rank in range(len(case.tokens))]
    want = run_virtual(case.virtual(), inputs)
    layer = case.virtual(combine_by=combine_by)
    buffers = layer._buffers
    bits = torch.tensor([poison], dtype=torch.float32).view(torch.int32).item()
    received = (*buffers.rows.buffers, *buffers.gradients.buffers)
    for shared in (*received, buffers.meta, buffers.counts):
        for own in shared.own:
            own.fill_(bits)
    for shared in (buffers.sums, buffers.weights):
        for own in shared.own:
            own.fill_(poison)
    for got, reference in zip(run_virtual(layer, inputs), want, strict=True):
        for name, value in reference.items():
            assert torch.equal(got[name], value), name


@pytest.mark.parametrize("combine_by", ["put", "get"])
@pytest.mark.parametrize("codec", [None, MXFP8])
def test_fresh_memory_is_never_read(combine_by, codec):
    """Whatever torch allocates is NaN, or the largest integer, for buffers and all else."""
    options = {"combine_by": combine_by, "codec": codec, "backward_codec": codec}
    cases = [
        Problem(tokens=(6, 0, 3, 1), num_experts=8, top_k=3, seed=seed, dtype=dtype, width=32)
        for seed, dtype in enumerate((torch.float32, torch.bfloat16))
    ]
    inputs = [[case.inputs(rank) for rank in range(4)] for case in cases]
    want = [
        run_virtual(*run) for run in zip([c.virtual(**options) for c in cases], inputs, strict=True)
    ]
    torch.set_deterministic_debug_mode("error")
    try:
        assert torch.empty(3).isnan().all(), "memory is not poisoned"
        for case, given_inputs, reference in zip(cases, inputs, want, strict=True):
            layer = case.virtual(**options)
            for _ in range(3):
                for got, value in zip(run_virtual(layer, given_inputs), reference, strict=True):
                    for name in value:
                        assert torch.equal(got[name], value[name]), name
    finally:
        torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_travel_bitwise(dtype):
    case = Problem(tokens=(5, 0, 7, 2), num_experts=8, top_k=3, width=64, dtype=dtype)
    inputs = [case.inputs(rank) for rank in range(4)]
    layer = case.virtual(codec=MXFP8, backward_codec=MXFP8)
    sent = layer.dispatch(*map(list, zip(*inputs, strict=True)))
    whole = [torch.cat(part) for part in zip(*inputs, strict=True)]
    want = LocalDispatcher(num_experts=8, codec=MXFP8).dispatch(whole[0], whole[1], whole[2])
    assert want.encoded is not None
    first = 0
    for part in sent:
        last = first + int(part.offsets_E[-1])
        assert part.encoded is not None
        for mine, theirs in zip(part.encoded, want.encoded, strict=True):
            mine, theirs = mine.view(torch.uint8), theirs.view(torch.uint8)
            assert torch.equal(mine[: last - first], theirs[first:last])
        assert torch.equal(part.rows_RD[: last - first], want.rows_RD[first:last])
        first = last
    assert first == len(want.rows_RD)
    del sent, part
    for rank, got in enumerate(run_virtual(layer, inputs)):
        assert got["x gradient"].isfinite().all()
        assert (got["weight gradient"] != 0).any() == (case.tokens[rank] > 0)
    assert layer.buffer_bytes["rows 0"] == 4 * 7 * 3 * (64 * 33 // 32 + 14)  # whole 16 bytes


def forward(layer: VirtualRowwise, case: Problem) -> tuple[list[Tensor], list[Tensor]]:
    """Return the leaves and the results of one dispatch and combine."""
    inputs = [case.inputs(rank) for rank in range(len(case.tokens))]
    leaves = [x.requires_grad_() for x, _, _ in inputs]
    sent = layer.dispatch(leaves, [ids for _, ids, _ in inputs], [w for _, _, w in inputs])
    results = [expert_results(part, layer.local_experts(r)).exp() for r, part in enumerate(sent)]
    return leaves, layer.combine(results, sent[0].handle)


CASES = [
    Problem(tokens=(4, 3), num_experts=4, top_k=2, seed=seed, options={"live_forwards": 3})
    for seed in range(3)
]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_live_forwards_do_not_touch_each_other(order):
    layer = CASES[0].virtual()
    alone = []
    for case in CASES:
        leaves, results = forward(layer, case)
        loss_of(results).backward()
        alone.append([leaf.grad for leaf in leaves])
    live = [forward(layer, case) for case in CASES]
    assert layer.num_free_leases == 0
    for done, number in enumerate(order):
        loss_of(live[number][1]).backward()
        assert layer.num_free_leases == done + 1
    for (leaves, _), want in zip(live, alone, strict=True):
        assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(leaves, want, strict=True))


def test_a_forward_too_many_is_refused_and_leaves_the_others_right():
    layer = CASES[0].virtual(live_forwards=1)
    _, want = forward(layer, CASES[0])
    loss_of(want).backward()
    leaves, results = forward(layer, CASES[0])
    with pytest.raises(RuntimeError, match=r"`live_forwards` must be at least .*, got 1, and all"):
        forward(layer, CASES[1])
    loss_of(results).backward(retain_graph=True)
    assert layer.num_free_leases == 0  # a second backward may read the rows
    first = [leaf.grad.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    loss_of(results).backward()
    assert layer.num_free_leases == 1
    assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(leaves, first, strict=True))


def test_leases_end_with_a_dropped_graph_and_without_gradients():
    layer = CASES[0].virtual(live_forwards=1)
    forward(layer, CASES[0])  # dropped at once
    assert layer.num_free_leases == 1
    with torch.no_grad():
        inputs = [CASES[0].inputs(rank) for rank in range(2)]
        sent = layer.dispatch(*map(list, zip(*inputs, strict=True)))
        assert layer.num_free_leases == 0
        layer.combine([part.rows_RD for part in sent], sent[0].handle)
        assert layer.num_free_leases == 1  # though the handle still lives


@pytest.mark.parametrize("num_layers", [1, 3])
def test_recomputed_layers_share_one_buffer(num_layers):
    """Two layers and more, recomputed in the backward: one receive buffer is enough."""
    case = Problem(tokens=(4, 3), num_experts=4, top_k=2)
    inputs = [case.inputs(rank) for rank in range(2)]

    def block(layer: VirtualRowwise, *tokens: Tensor) -> tuple[Tensor, ...]:
        sent = layer.dispatch(list(tokens), [i[1] for i in inputs], [i[2] for i in inputs])
        parts = enumerate(sent)
        results = [expert_results(part, layer.local_experts(r)).sin() for r, part in parts]
        return tuple(layer.combine(results, sent[0].handle))

    grads = []
    for recompute in (False, True):
        layer = case.virtual(live_forwards=1 if recompute else num_layers)
        leaves = [x.clone().requires_grad_() for x, _, _ in inputs]
        tokens = tuple(leaves)
        for _ in range(num_layers):
            if recompute:
                tokens = checkpoint(block, layer, *tokens, use_reentrant=False)
                assert layer.num_free_leases == 1
            else:
                tokens = block(layer, *tokens)
        loss_of(list(tokens)).backward()
        grads.append([leaf.grad for leaf in leaves])
        assert layer.num_free_leases == (1 if recompute else num_layers)
    assert all(map(torch.equal, *grads))


SIZES = {"num_ranks": 2, "num_experts": 4, "max_tokens": 4, "width": 8, "top_k": 2}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_experts": 5}, ValueError, "multiple of `num_ranks`, got 5 and 2"),
        ({"max_tokens": 0}, ValueError, "`max_tokens` must be at least 1, got 0"),
        ({"live_forwards": 0}, ValueError, "`live_forwards` must be at least 1, got 0"),
        ({"width": 12}, ValueError, "multiple of 8 for torch.bfloat16.* got 12"),
        ({"dtype": torch.float64}, TypeError, "torch.bfloat16 or torch.float32, got torch.float64"),
        ({"capacity": 4}, ValueError, "got `capacity` without `admit`"),
        ({"admit": keep_tail}, ValueError, "got `admit` without `capacity`"),
        ({"capacity": 0, "admit": keep_tail}, ValueError, "`capacity` must be at least 1, got 0"),
        ({"max_tokens": 2**30}, ValueError, r"`ranks \* max_tokens \* top_k` must be less than"),
        ({"impl": "cuda"}, ValueError, "`impl` must be one of .* got 'cuda'"),
        ({"combine_by": "push"}, ValueError, r"`combine_by` must be .*'put', 'get'.*, got 'push'"),
        ({"max_tokens": 16.5}, TypeError, "`max_tokens` must be a whole number, got 16.5"),
        ({"num_ranks": 0}, ValueError, "`num_ranks` must be at least 1, got 0"),
        ({"num_experts": 4.0}, TypeError, "`num_experts` must be a whole number, got 4.0"),
        ({"top_k": "2"}, TypeError, "`top_k` must be a whole number, got '2'"),
        ({"live_forwards": True}, TypeError, "`live_forwards` must be a whole number, got True"),
        ({"capacity": 1.5, "admit": keep_tail}, TypeError, "`capacity` must be a whole number"),
        ({"capacity": 4, "admit": "fair"}, TypeError, "`admit` must be a function .* got 'fair'"),
        ({"codec": "mx"}, TypeError, "`codec` must be a PairCodec or None, got 'mx'"),
        ({"backward_codec": print}, TypeError, "`backward_codec` must be a PairCodec or None"),
    ],
)
def test_what_cannot_be_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        VirtualRowwise(**{**SIZES, **options})


def test_what_does_not_fit_is_refused_before_any_write():
    layer = VirtualRowwise(**SIZES)
    x, ids, weights = torch.ones(4, 8).bfloat16(), torch.zeros(4, 2).long(), torch.ones(4, 2)
    for wrong, error, message in (
        ((x.float(), ids, weights), TypeError, "`dtype` of the dispatcher, torch.bfloat16, got"),
        ((x, ids, weights.double()), TypeError, "`weights_TK` must be torch.float32, got"),
        ((x, ids + 4, weights), ValueError, "got an id outside"),
        ((x[:, :4], ids, weights), ValueError, r"`width`=8 .* got x \(4, 4\)"),
        ((torch.cat([x, x]), torch.cat([ids, ids]), torch.cat([weights] * 2)), ValueError, "most"),
    ):
        with pytest.raises(error, match=message):
            layer.dispatch(
                *([good, bad] for good, bad in zip((x, ids, weights), wrong, strict=True))
            )
        assert layer.num_free_leases == 1
    with pytest.raises(ValueError, match="`ids` must have one entry for each of 2 ranks, got 1"):
        layer.dispatch([x] * 2, [ids], [weights] * 2)
    sent = layer.dispatch([x] * 2, [ids] * 2, [weights] * 2)
    with pytest.raises(ValueError, match="`results` must have one entry for each of 2 ranks"):
        layer.combine([sent[0].rows_RD], sent[0].handle)
    with pytest.raises(TypeError, match="`handle` must come from `dispatch`, got NoneType"):
        layer.combine([part.rows_RD for part in sent], None)
    with pytest.raises(ValueError, match=r"shape \(16, 8\), got \(3, 8\)"):
        layer.combine([part.rows_RD[:3] for part in sent], sent[0].handle)
