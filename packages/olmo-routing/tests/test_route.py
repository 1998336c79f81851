"""`route` against a loop in plain Python floats, which are float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_routing import route

INF, NAN = math.inf, math.nan


def oracle(logits, top_k, gate, renormalize, bias, num_groups, topk_groups):
    """Route one token: its ids and weights."""
    num_experts = len(logits)
    if gate == "sigmoid":
        scores = [1 / (1 + math.exp(-z)) for z in logits]
    else:
        exponentials = [math.exp(z - max(logits)) for z in logits]
        scores = [e / sum(exponentials) for e in exponentials]
    merit = [s + b for s, b in zip(scores, bias, strict=True)]
    size = num_experts // num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
    groups.sort(key=lambda group: -sum(sorted((merit[e] for e in group), reverse=True)[:2]))
    allowed = sorted(e for group in groups[:topk_groups] for e in group)
    ids = sorted(allowed, key=lambda e: -merit[e])[:top_k]
    total = sum(scores[e] for e in ids) if renormalize else 1.0
    return ids, [scores[e] / total for e in ids]


@st.composite
def cases(draw):
    num_groups, size = draw(st.sampled_from([(1, 1), (1, 7), (2, 3), (3, 1), (4, 4), (6, 2)]))
    num_experts = num_groups * size
    topk_groups = draw(st.integers(1, num_groups))
    gate = draw(st.sampled_from(["softmax", "softmax_topk", "sigmoid"]))
    return {
        "num_tokens": draw(st.sampled_from([0, 1, 5, num_experts])),
        "num_experts": num_experts,
        "top_k": draw(st.integers(1, topk_groups * size)),
        "gate": gate,
        "renormalize": gate == "softmax_topk" or draw(st.booleans()),
        "num_groups": num_groups,
        "topk_groups": topk_groups,
        "biased": draw(st.booleans()),
        "coarse": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


@settings(max_examples=60, deadline=None)
@given(cases())
def test_agrees_with_a_loop(case):
    generator = torch.Generator().manual_seed(case["seed"])
    shape = (case["num_tokens"], case["num_experts"])
    logits = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    if case["coarse"]:  # many exact ties
        logits = (logits / 3).round()
    bias = torch.zeros(shape[1], dtype=torch.float64)
    if case["biased"]:
        bias = torch.randn(shape[1], generator=generator, dtype=torch.float64)
    mask = torch.rand(shape[0], generator=generator) < 0.7
    options = {name: case[name] for name in ("gate", "renormalize", "num_groups", "topk_groups")}
    routing = route(logits, case["top_k"], **options, route_scale=2.5, bias_E=bias, mask_T=mask)
    for t in range(shape[0]):
        ids, weights = oracle(
            logits[t].tolist(),
            case["top_k"],
            case["gate"],
            case["renormalize"],
            bias.tolist(),
            case["num_groups"],
            case["topk_groups"],
        )
        got_ids, got_weights = routing.expert_ids_TK[t].tolist(), routing.weights_TK[t].tolist()
        if mask[t]:
            assert got_ids == ids
            assert got_weights == pytest.approx([2.5 * w for w in weights], rel=1e-12)
        else:
            assert got_ids == [-1] * case["top_k"]
            assert got_weights == [0.0] * case["top_k"]
    flat = routing.expert_ids_TK.flatten().tolist()
    assert routing.counts_E.tolist() == [flat.count(e) for e in range(shape[1])]


def test_dtypes():
    logits = torch.randn(5, 4)
    single, double, half = (route(logits.to(d), 2) for d in (torch.float, torch.double, torch.half))
    assert single.expert_ids_TK.dtype == torch.int64
    assert single.counts_E.dtype == torch.int32
    for name in ("weights_TK", "scores_TE", "logits_TE"):
        assert getattr(single, name).dtype == torch.float32
        assert getattr(double, name).dtype == torch.float64
        assert getattr(half, name).dtype == torch.float32
    rounded = route(logits.half().float(), 2)
    assert torch.equal(half.weights_TK, rounded.weights_TK)


def test_the_gates_three_names_for_one_weight():
    logits = torch.randn(9, 6, dtype=torch.float64)
    softmax, topk = route(logits, 3), route(logits, 3, gate="softmax_topk")
    assert torch.equal(softmax.expert_ids_TK, topk.expert_ids_TK)
    selected = torch.softmax(logits.gather(1, topk.expert_ids_TK), 1)
    torch.testing.assert_close(topk.weights_TK, selected)
    torch.testing.assert_close(softmax.weights_TK, selected)


def test_ties_go_to_the_lowest_id():
    signed_zeros = torch.tensor([[0.0, -0.0, 0.0, -0.0], [-0.0, 0.0, -0.0, 0.0]])
    assert route(signed_zeros, 3).expert_ids_TK.tolist() == [[0, 1, 2]] * 2
    wide = torch.zeros(37, 64)
    for gate in ("softmax", "sigmoid"):
        routing = route(wide, 4, gate=gate, num_groups=8, topk_groups=2)
        assert routing.expert_ids_TK.tolist() == [[0, 1, 2, 3]] * 37
    assert route(torch.tensor([[1.0, 3.0, 3.0, 1.0]]), 3).expert_ids_TK.tolist() == [[1, 2, 0]]


def test_ties_between_groups_go_to_the_lowest_id_not_to_the_better_group():
    logits = torch.tensor([[1.0, 0.0, 1.0, 0.5, -9.0, -9.0]])
    for gate in ("softmax", "sigmoid"):
        routing = route(logits, 1, gate=gate, num_groups=3, topk_groups=2)
        assert routing.expert_ids_TK.tolist() == [[0]]


def test_saturated_scores_keep_the_order_of_the_logits():
    rising = torch.tensor([[20.0, 40.0, 60.0], [-200.0, -150.0, 0.0], [-300.0, -200.0, -250.0]])
    for bias in (None, torch.zeros(3)):
        ids = route(rising, 2, gate="sigmoid", bias_E=bias).expert_ids_TK
        assert ids.tolist() == [[2, 1], [2, 1], [1, 2]]
    assert route(rising, 2).expert_ids_TK.tolist() == [[2, 1], [2, 1], [1, 2]]


def test_bias_selects_but_never_weighs():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], requires_grad=True)
    bias = torch.tensor([-9.0, 0.0, 0.0, 9.0], requires_grad=True)
    routing = route(logits, 2, bias_E=bias, renormalize=False)
    scores = torch.softmax(logits, 1)
    assert routing.expert_ids_TK.tolist() == [[3, 1]]
    torch.testing.assert_close(routing.weights_TK, scores[:, [3, 1]])
    torch.testing.assert_close(routing.scores_TE, scores)
    routing.weights_TK.sum().backward()
    assert bias.grad is None


@pytest.mark.parametrize("gate", ["softmax", "softmax_topk", "sigmoid"])
def test_weights_sum_to_the_scale_even_where_scores_underflow(gate):
    logits = torch.tensor([[900.0, -900.0, -901.0, 0.0]], requires_grad=True)
    bias = torch.tensor([-9.0, 5.0, 5.0, -9.0])
    routing = route(logits, 2, gate=gate, bias_E=bias, route_scale=2.0)
    assert routing.expert_ids_TK.tolist() == [[1, 2]]
    expected = [2 * math.e / (1 + math.e), 2 / (1 + math.e)]
    assert routing.weights_TK[0].tolist() == pytest.approx(expected, rel=1e-6)
    routing.weights_TK[0, 0].backward()
    assert logits.grad is not None
    slope = 2 * math.e / (1 + math.e) ** 2
    assert logits.grad[0].tolist() == pytest.approx([0, slope, -slope, 0], rel=1e-5)


@pytest.mark.parametrize(
    ("row", "ids", "weights"),
    [
        ([NAN, -INF, 1.0, NAN], [2, 1, 0], [1.0, 0.0, 0.0]),
        ([NAN, NAN, NAN, NAN], [0, 1, 2], [0.0, 0.0, 0.0]),
        ([-INF, NAN, -INF, -INF], [0, 2, 3], [0.0, 0.0, 0.0]),
        ([0.0, INF, NAN, INF], [1, 3, 0], [0.5, 0.5, 0.0]),
        ([INF, INF, INF, INF], [0, 1, 2], [1 / 3, 1 / 3, 1 / 3]),
        ([1.0, NAN, 1.0, -INF], [0, 2, 3], [0.5, 0.5, 0.0]),
    ],
)
@pytest.mark.parametrize("gate", ["softmax", "softmax_topk"])
def test_softmax_of_infinities_and_nan(row, ids, weights, gate):
    logits = torch.tensor([row, [0.0, 1.0, 2.0, 3.0]], requires_grad=True)
    routing = route(logits, 3, gate=gate)
    assert routing.expert_ids_TK[0].tolist() == ids
    assert routing.weights_TK[0].tolist() == pytest.approx(weights)
    assert routing.expert_ids_TK[1].tolist() == [3, 2, 1]  # a broken token leaves the others alone
    (routing.weights_TK[:, 0].sum() + routing.scores_TE[:, 0].sum()).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[1].abs().sum() > 0


def test_scores_split_over_more_infinities_than_experts_selected():
    logits = torch.tensor([[INF, 0.0, INF, INF]])
    routing = route(logits, 2, renormalize=False)
    assert routing.weights_TK[0].tolist() == pytest.approx([1 / 3, 1 / 3])
    assert route(logits, 2).weights_TK[0].tolist() == [0.5, 0.5]


def test_sigmoid_of_infinities_and_nan():
    logits = torch.tensor([[NAN, INF, 0.0, -INF], [NAN, NAN, NAN, NAN]], requires_grad=True)
    plain = route(logits, 4, gate="sigmoid", renormalize=False)
    assert plain.expert_ids_TK.tolist() == [[1, 2, 3, 0], [0, 1, 2, 3]]
    assert plain.weights_TK.tolist() == [[1.0, 0.5, 0.0, 0.0], [0.0] * 4]
    normal = route(logits, 4, gate="sigmoid")
    assert normal.weights_TK[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0.0, 0.0])
    assert normal.weights_TK[1].tolist() == [0.0] * 4
    (plain.weights_TK.sum() + normal.weights_TK[:, 0].sum()).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_a_nan_stays_last_whatever_the_bias_and_group():
    logits = torch.tensor([[NAN, NAN, 0.0, -5.0, NAN, 9.0]])
    bias = torch.tensor([99.0, 99.0, 0.0, 0.0, 99.0, 0.0])
    assert route(logits, 3, bias_E=bias).expert_ids_TK.tolist() == [[5, 2, 3]]
    grouped = route(logits, 2, num_groups=3, topk_groups=1)
    assert grouped.expert_ids_TK.tolist() == [[2, 3]]
    everything = route(torch.full((4, 6), NAN), 3, num_groups=3, topk_groups=2)
    assert everything.expert_ids_TK.tolist() == [[0, 1, 2]] * 4


@pytest.mark.parametrize("gate", ["softmax", "softmax_topk", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_gradients(gate, renormalize):
    if gate == "softmax_topk" and not renormalize:
        return
    logits = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([True, True, False, True, True])

    def outputs(x):
        routing = route(x, 3, gate=gate, renormalize=renormalize, route_scale=3.0, mask_T=mask)
        return routing.weights_TK, routing.scores_TE

    assert torch.autograd.gradcheck(outputs, (logits.requires_grad_(),))


def test_one_renormalised_expert_has_weight_one_and_no_gradient():
    logits = torch.randn(7, 5, requires_grad=True)
    weights = route(logits, 1).weights_TK
    weights.sum().backward()
    assert torch.equal(weights, torch.ones(7, 1))
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(7, 5))


def test_a_weight_of_exactly_zero_is_still_a_route():
    routing = route(torch.tensor([[0.0, -800.0, -900.0]]), 2, renormalize=False)
    assert routing.expert_ids_TK.tolist() == [[0, 1]]
    assert routing.weights_TK.tolist() == [[1.0, 0.0]]
    assert routing.counts_E.tolist() == [1, 1, 0]


def test_the_mask_is_of_tokens_also_when_there_are_as_many_experts():
    # An (E,)-shaped mask broadcast over the wrong axis would count [1, 1, 0].
    logits = torch.tensor([[0.0, 0.0, 9.0], [9.0, 0.0, 0.0], [0.0, 9.0, 0.0]])
    routing = route(logits, 1, mask_T=torch.tensor([True, True, False]))
    assert routing.counts_E.tolist() == [1, 0, 1]


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_appended_padding_changes_nothing(gate):
    logits = torch.randn(7, 4)
    padded = torch.cat([logits, torch.full((4, 4), NAN)]).requires_grad_()
    mask = torch.arange(11) < 7
    alone, routing = route(logits, 2, gate=gate), route(padded, 2, gate=gate, mask_T=mask)
    assert torch.equal(routing.expert_ids_TK[:7], alone.expert_ids_TK)
    assert torch.equal(routing.weights_TK[:7], alone.weights_TK)
    assert torch.equal(routing.counts_E, alone.counts_E)
    routing.weights_TK.square().sum().backward()
    assert padded.grad is not None
    assert torch.equal(padded.grad[7:], torch.zeros(4, 4))


LOGITS = torch.zeros(3, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"top_k": 9}, ValueError, r"`top_k` must be in \[1, `num_experts`=8\], got 9"),
        ({"top_k": 0}, ValueError, "`top_k` must be at least 1, got 0"),
        ({"top_k": 2.0}, TypeError, "`top_k` must be an int, got float"),
        ({"top_k": True}, TypeError, "`top_k` must be an int, got bool"),
        ({"gate": "relu"}, ValueError, "`gate` must be one of .*softmax_topk.*, got 'relu'"),
        (
            {"gate": "softmax_topk", "renormalize": False},
            ValueError,
            "`renormalize` must be True with gate 'softmax_topk'",
        ),
        ({"route_scale": 0.0}, ValueError, "`route_scale` must be positive and finite, got 0.0"),
        ({"route_scale": INF}, ValueError, "`route_scale` must be positive and finite, got inf"),
        ({"num_groups": 3}, ValueError, "`num_groups` must divide the 8 experts, got 3"),
        ({"topk_groups": 2}, ValueError, r"`topk_groups` must be in \[1, `num_groups`=1\], got 2"),
        (
            {"num_groups": 4, "top_k": 3},
            ValueError,
            "must hold at least `top_k`=3 experts, got 2; select more groups",
        ),
        ({"bias_E": torch.zeros(7)}, ValueError, r"`bias_E` must have shape \(8,\).*got \(7,\)"),
        ({"bias_E": torch.zeros(8).int()}, TypeError, "`bias_E` must be a floating-point tensor"),
        ({"mask_T": torch.ones(3)}, TypeError, "`mask_T` must be bool .*torch.float32"),
        (
            {"mask_T": torch.ones(8).bool()},
            ValueError,
            r"`mask_T` must have shape \(3,\) on cpu, got \(8,\) on cpu",
        ),
        ({"logits_TE": LOGITS.long()}, TypeError, "`logits_TE` must be a floating-point tensor"),
        (
            {"logits_TE": LOGITS[None]},
            ValueError,
            r"`logits_TE` must have two dimensions.*\(1, 3, 8\); flatten",
        ),
    ],
)
def test_messages(arguments, error, message):
    with pytest.raises(error, match=message):
        route(**{"logits_TE": LOGITS, "top_k": 2, **arguments})
