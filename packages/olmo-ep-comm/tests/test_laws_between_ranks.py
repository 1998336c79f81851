"""The laws of `test_laws` between processes, for every backend that can be one of several ranks."""

import sys
from collections.abc import Sequence

import deep_ep_stand_in
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from olmo_ep_comm import Dispatched, LocalDispatcher, create_dispatcher
from rowwise_problem import Inputs, Problem, expert_results, loss_of
from torch import Tensor

pytestmark = pytest.mark.dist
E, D, MOST = 8, 256, 8
SIZES = {"max_tokens": MOST, "width": D, "live_forwards": 2}
KINDS = {
    "all_to_all": ("all_to_all", {}),
    "put": ("rowwise", {**SIZES, "combine_by": "put"}),
    "get": ("rowwise", {**SIZES, "combine_by": "get"}),
    "deepep": ("deepep", {"max_tokens": MOST, "width": D}),
}
EXACT = [("all_to_all", torch.float32), ("get", torch.float32)]  # not of the stand-in's slow loop
ROUNDED = [("all_to_all", torch.bfloat16), ("put", torch.bfloat16), ("deepep", torch.bfloat16)]
over_kinds = pytest.mark.parametrize(("kind", "dtype"), EXACT + ROUNDED)
Values = list[Tensor]  # results, gradients of tokens, gradients of weights


def over_routes(law):
    """Run a law with a few tokens on either rank, and with what hypothesis comes upon."""
    drawn = given(tokens=st.tuples(*[st.integers(0, 5)] * 2), seed=st.integers(0, 99))
    few = settings(max_examples=2, deadline=None, phases=[Phase.explicit, Phase.generate])
    return few(drawn(example(tokens=(5, 3), seed=4)(law)))


def inputs(tokens: Sequence[int], seed: int, dtype: torch.dtype, top_k: int = 3) -> list[Inputs]:
    case = Problem(
        tokens=tuple(tokens),
        num_experts=E,
        top_k=top_k,
        width=D,
        dtype=dtype,
        seed=seed,
        is_distinct=True,
    )
    return [case.inputs(rank) for rank in range(len(tokens))]


def bend(sent: Dispatched, local: range) -> Tensor:
    """Experts that need their rows in the backward."""
    return expert_results(sent, local) + sent.rows_RD.square()


def weigh(sent: Dispatched, local: range) -> Tensor:
    """Experts that return their rows."""
    return sent.rows_RD * sent.row_weights_R[:, None].to(sent.rows_RD.dtype)


def _run(
    rank: int, world: int, kind: str, layers: list[list[Inputs]], name: str, order: list[int]
) -> list[Values]:
    """One layer after another forward and backward; with an `order` all of them forward first."""
    sys.modules["deep_ep"] = deep_ep_stand_in.make_module("2.1")
    backend, options = KINDS[kind]
    if options:
        options = {**options, "top_k": layers[0][0][1].shape[1]}
    if backend == "rowwise":
        options = {**options, "dtype": layers[0][0][0].dtype}
    dispatcher = create_dispatcher(backend, num_experts=E, **options)
    experts = {"bend": bend, "weigh": weigh}[name]
    values, losses = [], []
    for number, parts in enumerate(layers):
        x_TD, ids, weights_TK = parts[rank]
        x_TD, weights_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
        sent = dispatcher.dispatch(x_TD, ids, weights_TK)
        y_TD = dispatcher.combine(experts(sent, dispatcher.local_experts), sent.handle)
        del sent
        values.append([y_TD, x_TD, weights_TK])
        losses.append(loss_of([y_TD]))
        if not order:
            losses[number].backward()
    for number in order:
        losses[number].backward()
    return [[y.detach(), x.grad, w.grad] for y, x, w in values]


def run(
    processes, kind: str, *layers: list[Inputs], experts: str = "bend", order: Sequence[int] = ()
) -> list[list[Values]]:
    """Return what each layer gave each rank."""
    world = len(layers[0])
    ranks = processes.run(_run, kind, list(layers), experts, list(order), world=world)
    return [[values[number] for values in ranks] for number in range(len(layers))]


def assert_equal(got: list[Values], want: list[Values]) -> None:
    for one, other in zip(got, want, strict=True):
        assert all(map(torch.equal, one, other))


@over_kinds
@over_routes
def test_weights_that_add_up_to_one_bring_every_token_home(processes, kind, dtype, tokens, seed):
    for top_k in (1, 3):
        parts = []
        for x_TD, ids, _ in inputs(tokens, seed, dtype, top_k):
            ids[:1] = -1
            share_T1 = 1 / (ids >= 0).sum(1, keepdim=True).clamp(min=1)
            parts.append((x_TD, ids, share_T1.expand(ids.shape).contiguous()))
        (layer,) = run(processes, kind, parts, experts="weigh")
        # The weight is rounded, and so are the product, a rank's sum and the whole sum.
        rounding = 4 * 2.0**-9 if dtype == torch.bfloat16 else 2 * top_k * 2.0**-24
        for (y_TD, grad_TD, _), (x_TD, ids, _) in zip(layer, parts, strict=True):
            is_out_T1 = (ids < 0).all(1, keepdim=True)
            want_TD = x_TD.masked_fill(is_out_T1, 0).float()
            bound_TD = want_TD.abs() * (0 if top_k == 1 else rounding)
            assert ((y_TD.float() - want_TD).abs() <= bound_TD).all()
            assert (grad_TD == 0).all(1).tolist() == is_out_T1[:, 0].tolist()


@over_kinds
@over_routes
def test_the_order_of_tokens_is_that_of_the_results(processes, kind, dtype, tokens, seed):
    parts = inputs(tokens, seed, dtype)
    orders = [torch.arange(len(x_TD)).flip(0).roll(seed) for x_TD, _, _ in parts]
    mixed = [
        (x[order], ids[order], w[order]) for (x, ids, w), order in zip(parts, orders, strict=True)
    ]
    got, want = run(processes, kind, mixed, parts)
    assert_equal(
        got, [[v[order] for v in values] for values, order in zip(want, orders, strict=True)]
    )


@over_kinds
@over_routes
def test_the_order_of_slots_is_that_of_the_sum_alone(processes, kind, dtype, tokens, seed):
    parts, order = inputs(tokens, seed, dtype), torch.tensor([2, 0, 1])
    mixed = [(x, ids[:, order], w[:, order]) for x, ids, w in parts]
    got, want = run(processes, kind, mixed, parts)
    for (y_TD, _, grad_TK), (like_TD, _, like_TK) in zip(got, want, strict=True):
        # Rounding may differ, relative to sums of values of up to 60.
        close = {"rtol": 2.0**-6, "atol": 0.5} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(y_TD, like_TD, **close)
        if dtype == torch.float32:
            torch.testing.assert_close(grad_TK, like_TK[:, order], rtol=1e-4, atol=1e-2)


@over_kinds
@over_routes
def test_a_token_gets_the_same_on_every_rank(processes, kind, dtype, tokens, seed):
    parts = inputs(tokens, seed, dtype)
    whole = [torch.cat(part) for part in zip(*parts, strict=True)]
    count = sum(tokens)
    layouts = ([0, count], [count, 0]) if count <= MOST else ([2, count - 2], [count - 2, 2])
    moved = [
        list(zip(*(part.split(sizes) for part in whole), strict=True))
        for sizes in (tokens, *(sizes for sizes in layouts if max(sizes) <= MOST))
    ]
    first, *others = (
        [torch.cat(values) for values in zip(*layer, strict=True)]
        for layer in run(processes, kind, *moved)
    )
    assert others
    for other in others:
        assert all(map(torch.equal, first, other))


@over_kinds
@over_routes
def test_live_layers_repeat_themselves_and_do_not_touch_each_other(
    processes, kind, dtype, tokens, seed
):
    """Two alive, backward in both orders, and routes that change between the same ones."""
    parts, others = inputs(tokens, seed, dtype), inputs(tokens[::-1], seed + 1, dtype)
    first, second, again, last = run(processes, kind, parts, others, parts, others)
    assert_equal(again, first)
    assert_equal(last, second)
    for order in ([0, 1], [1, 0]):
        live_first, live_second = run(processes, kind, parts, others, order=order)
        assert_equal(live_first, first)
        assert_equal(live_second, second)


@over_kinds
@over_routes
def test_a_weight_of_zero_keeps_its_gradient(processes, kind, dtype, tokens, seed):
    parts = [(x, ids, torch.zeros_like(w)) for x, ids, w in inputs(tokens, seed, dtype)]
    (layer,) = run(processes, kind, parts, experts="weigh")
    local = LocalDispatcher(num_experts=E)
    for (_, _, grad_TK), (x_TD, ids, weights_TK) in zip(layer, parts, strict=True):
        weights_TK.requires_grad_()
        sent = local.dispatch(x_TD, ids, weights_TK)
        loss_of([local.combine(weigh(sent, range(E)), sent.handle)]).backward()
        assert torch.equal(grad_TK, weights_TK.grad)
        assert ((grad_TK != 0) == (ids >= 0)).all()
