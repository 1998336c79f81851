"""One process: against loops in plain Python, float64 gradients, and undefined rows."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from olmo_ep_comm import Dispatched, Dispatcher, LocalDispatcher
from olmo_ep_comm._autograd import dispatch_rows
from olmo_ep_comm._local import _Loopback
from olmo_ep_comm._routed_exchange import RoutedExchange
from olmo_ep_comm.reference import sort_routes
from torch import Tensor

NUM_EXPERTS = 5


@st.composite
def routed(draw):
    """Ids of up to 9 tokens: experts may be empty, tokens may have no route or name one twice."""
    num_slots = draw(st.sampled_from([1, 2, 3, 5]))
    expert = st.integers(-1, NUM_EXPERTS - 1)
    ids = draw(st.lists(st.lists(expert, min_size=num_slots, max_size=num_slots), max_size=9))
    return torch.tensor(ids, dtype=torch.int64).view(len(ids), num_slots)


def make_inputs(expert_ids_TK: Tensor, dtype: torch.dtype, width: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(expert_ids_TK.numel())
    weight_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    x_TD = torch.randn(expert_ids_TK.shape[0], width, generator=generator, dtype=torch.float64)
    weights_TK = torch.rand(expert_ids_TK.shape, generator=generator, dtype=torch.float64)
    return x_TD.to(dtype), weights_TK.to(weight_dtype)


def loop_over_rows(expert_ids_TK: Tensor) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the (token, slot) of every row and the ends of the experts, by counting."""
    rows, ends = [], []
    for expert in range(NUM_EXPERTS):
        for token, ids in enumerate(expert_ids_TK.tolist()):
            rows += [(token, slot) for slot, chosen in enumerate(ids) if chosen == expert]
        ends.append(len(rows))
    return rows, ends


@settings(max_examples=40, deadline=None)
@given(expert_ids_TK=routed(), ids_dtype=st.sampled_from([torch.int64, torch.int32]))
def test_rows_are_those_of_a_loop(expert_ids_TK, ids_dtype):
    x_TD, weights_TK = make_inputs(expert_ids_TK, torch.float32)
    got = LocalDispatcher(num_experts=NUM_EXPERTS).dispatch(
        x_TD, expert_ids_TK.to(ids_dtype), weights_TK
    )
    rows, ends = loop_over_rows(expert_ids_TK)
    assert got.rows_RD.tolist() == [x_TD[token].tolist() for token, _ in rows]
    assert got.row_weights_R.tolist() == [weights_TK[route].item() for route in rows]
    assert got.offsets_E.tolist() == ends
    assert got.offsets_E.dtype == torch.int32
    assert got.row_weights_R.dtype == torch.float32
    assert got.num_dropped.item() == 0
    assert got.num_dropped.shape == ()


@settings(max_examples=40, deadline=None)
@given(
    expert_ids_TK=routed(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_combine_is_the_sum_in_slot_order(expert_ids_TK, dtype):
    x_TD, weights_TK = make_inputs(expert_ids_TK, dtype)
    dispatcher = LocalDispatcher(num_experts=NUM_EXPERTS)
    dispatched = dispatcher.dispatch(x_TD, expert_ids_TK, weights_TK)
    y_RD = torch.randn(dispatched.rows_RD.shape).to(dtype)
    got = dispatcher.combine(y_RD, dispatched.handle)

    row_of_route = {route: row for row, route in enumerate(loop_over_rows(expert_ids_TK)[0])}
    for token, ids in enumerate(expert_ids_TK.tolist()):
        want = torch.zeros(3, dtype=torch.promote_types(dtype, torch.float32))
        for slot, expert in enumerate(ids):
            if expert >= 0:
                want = want + y_RD[row_of_route[token, slot]]
        assert torch.equal(got[token], want.to(dtype))  # bitwise, one rounding at the end
    assert got.dtype == dtype


def test_bfloat16_is_summed_in_float32():
    dispatcher = LocalDispatcher(num_experts=3)
    ids = torch.tensor([[0, 1, 2]])
    dispatched = dispatcher.dispatch(torch.ones(1, 1).bfloat16(), ids, torch.ones(1, 3))
    y_RD = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()  # 256 + 1 is 256 in bfloat16
    assert dispatcher.combine(y_RD, dispatched.handle).item() == 258.0


@settings(max_examples=10, deadline=None)
@given(expert_ids_TK=routed())
def test_gradients_against_finite_differences(expert_ids_TK):
    x_TD, weights_TK = make_inputs(expert_ids_TK, torch.float64, width=2)
    dispatcher = LocalDispatcher(num_experts=NUM_EXPERTS)

    def layer(x_TD: Tensor, weights_TK: Tensor) -> Tensor:
        dispatched = dispatcher.dispatch(x_TD, expert_ids_TK, weights_TK)
        y_RD = dispatched.rows_RD.sin() * dispatched.row_weights_R[:, None]
        return dispatcher.combine(y_RD, dispatched.handle)

    inputs = (x_TD.requires_grad_(), weights_TK.requires_grad_())
    if expert_ids_TK.numel():
        assert torch.autograd.gradcheck(layer, inputs)
    layer(*inputs).sum().backward()
    assert weights_TK.grad is not None
    assert torch.all(weights_TK.grad[expert_ids_TK < 0] == 0)


@settings(max_examples=20, deadline=None)
@given(expert_ids_TK=routed())
def test_combine_is_the_adjoint_of_dispatch(expert_ids_TK):
    x_TD, weights_TK = make_inputs(expert_ids_TK, torch.float64)
    dispatcher = LocalDispatcher(num_experts=NUM_EXPERTS)
    dispatched = dispatcher.dispatch(x_TD, expert_ids_TK, weights_TK)
    y_RD = torch.randn_like(dispatched.rows_RD)
    left = (dispatched.rows_RD * y_RD).sum()
    right = (x_TD * dispatcher.combine(y_RD, dispatched.handle)).sum()
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_identity_experts_return_the_token():
    ids = torch.tensor([[2, 0], [-1, -1], [-1, 4]])
    x_TD, _ = make_inputs(ids, torch.float32)
    weights_TK = torch.tensor([[0.5, 0.5], [0.0, 0.0], [0.0, 1.0]])
    dispatcher = LocalDispatcher(num_experts=NUM_EXPERTS)
    dispatched = dispatcher.dispatch(x_TD, ids, weights_TK)
    y_RD = dispatched.rows_RD * dispatched.row_weights_R[:, None]
    got = dispatcher.combine(y_RD, dispatched.handle)
    assert torch.equal(got, x_TD * torch.tensor([[1.0], [0.0], [1.0]]))


def dispatch_with_tail(x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
    """Dispatch as on a GPU: T*K rows, whatever the routes."""
    routes = sort_routes(expert_ids_TK, NUM_EXPERTS)
    exchange = RoutedExchange(routes, _Loopback())
    rows_RD, row_weights_R, handle = dispatch_rows(x_TD, weights_TK, exchange)
    return Dispatched(rows_RD, row_weights_R, routes.offsets_E, torch.tensor(0), handle)


@example(expert_ids_TK=torch.tensor([[-1, -1]]), poison=float("nan"))
@settings(max_examples=30, deadline=None)
@given(expert_ids_TK=routed(), poison=st.sampled_from([float("nan"), float("inf"), 1e30]))
def test_undefined_rows_are_never_read(expert_ids_TK, poison):
    results = []
    for tail in (False, True):
        x_TD, weights_TK = make_inputs(expert_ids_TK, torch.float32)
        x_TD.requires_grad_()
        weights_TK.requires_grad_()
        dispatcher = LocalDispatcher(num_experts=NUM_EXPERTS)
        dispatch = dispatch_with_tail if tail else dispatcher.dispatch
        dispatched = dispatch(x_TD, expert_ids_TK, weights_TK)
        num_rows = int(dispatched.offsets_E[-1])
        assert dispatched.rows_RD.shape[0] == (expert_ids_TK.numel() if tail else num_rows)
        y_RD = dispatched.rows_RD.sin() * dispatched.row_weights_R[:, None]
        undefined_R = torch.arange(y_RD.shape[0]) >= num_rows
        for tensor in (y_RD, dispatched.rows_RD, dispatched.row_weights_R):
            mask = undefined_R.view(-1, *(1 for _ in tensor.shape[1:]))
            tensor.register_hook(lambda grad, mask=mask: grad.masked_fill(mask, poison))
        y_RD = torch.where(undefined_R[:, None], poison, y_RD)
        got = dispatcher.combine(y_RD, dispatched.handle)
        got.square().sum().backward()
        results.append((got.detach(), x_TD.grad, weights_TK.grad))
    for plain, tailed in zip(*results, strict=True):
        assert torch.equal(plain, tailed)


def test_a_nan_stays_with_its_token():
    ids = torch.tensor([[0, 1], [-1, -1], [2, -1]])
    x_TD, weights_TK = make_inputs(ids, torch.float32)
    x_TD[0] = float("nan")
    weights_TK.requires_grad_()
    dispatcher = LocalDispatcher(num_experts=NUM_EXPERTS)
    dispatched = dispatcher.dispatch(x_TD, ids, weights_TK)
    y_RD = dispatched.rows_RD * dispatched.row_weights_R[:, None]
    y_TD = dispatcher.combine(y_RD, dispatched.handle)
    y_TD.sum().backward()
    assert weights_TK.grad is not None
    assert y_TD.isnan().any(1).tolist() == [True, False, False]
    assert weights_TK.grad.isnan().tolist() == [[True, True], [False, False], [False, False]]


def test_live_dispatches_do_not_touch_each_other():
    """Three forwards alive at once, backward in any order, must equal one at a time."""
    dispatcher = LocalDispatcher(num_experts=NUM_EXPERTS)
    batches = [torch.tensor([[0, 3], [4, -1]]), torch.tensor([[1, 2]]), torch.tensor([[4, 4]] * 3)]

    def forward(ids: Tensor) -> tuple[Tensor, Tensor]:
        x_TD, weights_TK = make_inputs(ids, torch.float32)
        dispatched = dispatcher.dispatch(x_TD.requires_grad_(), ids, weights_TK)
        return x_TD, dispatcher.combine(dispatched.rows_RD.exp(), dispatched.handle)

    alone = []
    for ids in batches:
        x_TD, y_TD = forward(ids)
        y_TD.sum().backward()
        alone.append(x_TD.grad)
    live = [forward(ids) for ids in batches]
    for number in (1, 0, 2):
        live[number][1].sum().backward()
    for (x_TD, _), want in zip(live, alone, strict=True):
        assert x_TD.grad is not None
        assert torch.equal(x_TD.grad, want)


def test_inputs_may_be_views_and_only_the_weights_may_need_a_gradient():
    ids = torch.tensor([[0, 4], [2, 2], [-1, 1]])
    x_TD, weights_TK = make_inputs(ids, torch.float32)
    dispatcher = LocalDispatcher(num_experts=NUM_EXPERTS)
    weights_TK = weights_TK.T.contiguous().T.requires_grad_()
    dispatched = dispatcher.dispatch(x_TD.T.contiguous().T, ids.T.contiguous().T, weights_TK)
    (dispatched.rows_RD.sum(1) * dispatched.row_weights_R).sum().backward()
    want = x_TD.sum(1, keepdim=True).expand(3, 2) * (ids >= 0)
    torch.testing.assert_close(weights_TK.grad, want)


def test_nothing_needs_a_gradient_when_no_input_does():
    ids = torch.tensor([[0, 4]])
    dispatcher = LocalDispatcher(num_experts=NUM_EXPERTS)
    dispatched = dispatcher.dispatch(torch.ones(1, 3), ids, torch.ones(1, 2))
    assert not dispatcher.combine(dispatched.rows_RD, dispatched.handle).requires_grad


def test_is_a_dispatcher():
    dispatcher = LocalDispatcher(num_experts=NUM_EXPERTS)
    assert isinstance(dispatcher, Dispatcher)
    assert dispatcher.local_experts == range(NUM_EXPERTS)
    dispatched = dispatcher.dispatch(torch.ones(1, 3), torch.tensor([[0]]), torch.ones(1, 1))
    with pytest.raises(AttributeError):
        setattr(dispatched, "rows_RD", None)  # noqa: B010 - a checker sees that it is frozen
