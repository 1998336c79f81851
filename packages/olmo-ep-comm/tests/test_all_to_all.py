"""Experts over several ranks: bitwise the one-process result, forward and backward."""

import math
from dataclasses import astuple, dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_ep_comm import AllToAllDispatcher, Dispatched, Dispatcher, LocalDispatcher
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

pytestmark = pytest.mark.dist
NUM_EXPERTS = 8
WIDTH = 3
LAYOUTS = ([[0], [1], [2], [3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]])


@dataclass(frozen=True)
class Case:
    """Tokens of four ranks. Test modules cannot be pickled: a worker gets `astuple(case)`."""

    tokens: tuple[int, ...]
    num_slots: int
    experts: tuple[int, ...]  # those that tokens may choose; -1 among them is no route
    dtype: torch.dtype
    seed: int

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(10 * self.seed + rank)
        shape = (self.tokens[rank], self.num_slots)
        chosen = torch.randint(len(self.experts), shape, generator=generator)
        weights_TK = torch.rand(shape, generator=generator)
        x_TD = torch.randn(shape[0], WIDTH, generator=generator, dtype=torch.float64)
        return x_TD.to(self.dtype), torch.tensor(self.experts)[chosen], weights_TK


@st.composite
def case(draw):
    tokens = draw(st.tuples(*[st.integers(0, 7)] * 4))
    experts = draw(st.lists(st.integers(-1, NUM_EXPERTS - 1), min_size=1, max_size=10))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    return Case(tokens, draw(st.integers(1, 4)), tuple(experts), dtype, draw(st.integers(0, 99)))


def apply_experts(
    dispatched: Dispatched, local: range, scale_ED: Tensor, bias_ED: Tensor
) -> Tensor:
    """Return `weight * (scale_e * row + bias_e)`; without rows a fresh tensor outside the graph."""
    pieces, start = [], 0
    for expert, end in zip(local, dispatched.offsets_E.tolist(), strict=True):
        if end > start:
            rows_RD = dispatched.rows_RD[start:end] * scale_ED[expert] + bias_ED[expert]
            pieces.append(rows_RD * dispatched.row_weights_R[start:end, None].to(rows_RD.dtype))
        start = end
    return torch.cat(pieces) if pieces else torch.zeros(0, WIDTH, dtype=dispatched.rows_RD.dtype)


def gradient(value: Tensor) -> Tensor:
    """Return the gradient, 0 for a parameter that no row of this rank reached."""
    return torch.zeros_like(value) if value.grad is None else value.grad


def make_group(layout: list[list[int]], rank: int) -> dist.ProcessGroup:
    """Make every group of the layout and return the one with this rank."""
    groups = [dist.new_group(ranks) for ranks in layout]
    (own,) = [group for group, ranks in zip(groups, layout, strict=True) if rank in ranks]
    assert isinstance(own, dist.ProcessGroup)
    return own


def run_layer(
    dispatcher: Dispatcher, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor
) -> dict[str, Tensor]:
    """One layer forward and backward: everything that came out of it."""
    x_TD, weights_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    scale_ED = torch.linspace(-2, 2, NUM_EXPERTS * WIDTH).view(NUM_EXPERTS, WIDTH).to(x_TD.dtype)
    bias_ED = scale_ED.flip(0).requires_grad_()
    scale_ED.requires_grad_()
    dispatched = dispatcher.dispatch(x_TD, expert_ids_TK, weights_TK)
    y_RD = apply_experts(dispatched, dispatcher.local_experts, scale_ED, bias_ED)
    y_TD = dispatcher.combine(y_RD, dispatched.handle)
    y_TD.backward(y_TD.detach().cos())
    local = slice(dispatcher.local_experts.start, dispatcher.local_experts.stop)
    return {
        "rows": dispatched.rows_RD.detach(),
        "row weights": dispatched.row_weights_R.detach(),
        "ends": dispatched.offsets_E,
        "y": y_TD.detach(),
        "x gradient": gradient(x_TD),
        "weight gradient": gradient(weights_TK),
        "scale gradient": gradient(scale_ED)[local],
        "bias gradient": gradient(bias_ED)[local],
    }


def expected(case: Case, ranks: list[int], rank: int) -> dict[str, Tensor]:
    """What `rank` must get: its part of one process that holds all tokens of `ranks`."""
    inputs = [torch.cat(parts) for parts in zip(*map(case.inputs, ranks), strict=True)]
    whole = run_layer(LocalDispatcher(num_experts=NUM_EXPERTS), *inputs)
    place, share = ranks.index(rank), NUM_EXPERTS // len(ranks)
    experts = slice(place * share, (place + 1) * share)
    first_row = int(whole["ends"][experts.start - 1]) if place else 0
    rows = slice(first_row, int(whole["ends"][experts.stop - 1]))
    first_token = sum(case.tokens[other] for other in ranks[:place])
    tokens = slice(first_token, first_token + case.tokens[rank])
    ends = whole.pop("ends")[experts] - first_row
    part: dict[str, slice] = dict.fromkeys(("rows", "row weights"), rows)
    part |= dict.fromkeys(("y", "x gradient", "weight gradient"), tokens)
    part |= dict.fromkeys(("scale gradient", "bias gradient"), experts)
    return {"ends": ends, **{name: value[part[name]] for name, value in whole.items()}}


def _compare_with_one_process(rank: int, world: int, fields: list[tuple]) -> None:
    for layout in LAYOUTS:
        group = make_group(layout, rank)
        (ranks,) = [ranks for ranks in layout if rank in ranks]
        dispatcher = AllToAllDispatcher(num_experts=NUM_EXPERTS, group=group)
        for case in (Case(*values) for values in fields):
            got = run_layer(dispatcher, *case.inputs(rank))
            want = expected(case, ranks, rank)
            for name, value in want.items():
                assert torch.equal(got[name], value), (name, layout, case, got[name], value)


@settings(max_examples=4, deadline=None)
@given(cases=st.lists(case(), min_size=4, max_size=4))
def test_any_group_equals_one_process_bitwise(processes, cases):
    processes.run(_compare_with_one_process, list(map(astuple, cases)), world=4)


def test_extreme_loads_equal_one_process_bitwise(processes):
    """No tokens on one rank, on none; all to one rank, to one expert, or nowhere; one token."""
    everyone = tuple(range(NUM_EXPERTS))
    spread = ((5, 0, 3, 7), (0, 0, 0, 0), (16, 16, 16, 16), (0, 1, 0, 0), (0, 0, 9, 0))
    cases = [
        (tokens, 4, experts, torch.float32, 1)
        for tokens in spread
        for experts in (everyone, (0, 1), (7,), (-1,), (-1, 3))
    ]
    processes.run(_compare_with_one_process, cases, world=4)


def _poison(rank: int, world: int, fields: list[tuple]) -> None:
    torch.set_deterministic_debug_mode("error")  # fills uninitialised memory with NaN
    try:
        assert torch.empty(3).isnan().all(), "memory is not poisoned"
        _compare_with_one_process(rank, world, fields)
    finally:
        torch.set_deterministic_debug_mode("default")


def test_uninitialised_memory_is_never_read(processes):
    cases = [
        ((5, 0, 3, 7), 2, (-1, 0, 1, 2, 6), torch.bfloat16, 2),
        ((4, 1, 0, 2), 3, (7,), torch.float32, 3),
    ]
    processes.run(_poison, cases, world=4)


def _log_exchanges() -> list[tuple[torch.dtype, int]]:
    """Record dtype and width of every exchange of this process from now on."""
    log, exchange = [], dist.all_to_all_single

    def logged(output, input, *arguments, **options):
        log.append((input.dtype, input.shape[1] if input.ndim == 2 else 1))
        return exchange(output, input, *arguments, **options)

    dist.all_to_all_single = logged
    return log


def _train(rank: int, world: int, fields: tuple) -> tuple[list, float]:
    """Two layers, three steps; rank 1's tokens and weights never need a gradient."""
    log = _log_exchanges()
    try:
        torch.manual_seed(0)
        dispatcher = AllToAllDispatcher(num_experts=NUM_EXPERTS)
        parameters = [torch.ones(NUM_EXPERTS, WIDTH, requires_grad=True) for _ in range(4)]
        x_TD, ids, weights_TK = Case(*fields).inputs(rank)
        x_TD.requires_grad_(rank in (0, 3))
        weights_TK.requires_grad_(rank in (2, 3))
        for _ in range(3):
            y_TD = x_TD
            for scale_ED, bias_ED in (parameters[:2], parameters[2:]):
                dispatched = dispatcher.dispatch(y_TD, ids, weights_TK)
                y_RD = apply_experts(dispatched, dispatcher.local_experts, scale_ED, bias_ED)
                y_TD = dispatcher.combine(y_RD, dispatched.handle)
            y_TD.square().sum().backward()
            with torch.no_grad():
                for value in parameters:
                    value -= 0.1 * gradient(value)
                    value.grad = None
        return log, sum(value.sum().item() for value in parameters)
    finally:
        dist.all_to_all_single = dist.distributed_c10d.all_to_all_single


@pytest.mark.parametrize("tokens", [(4, 0, 3, 5), (0, 0, 0, 0), (0, 0, 0, 6)])
@pytest.mark.parametrize("experts", [(0, 1), (0, 3, 4, 7)])
def test_every_rank_makes_the_same_exchanges(processes, tokens, experts):
    """Ranks without tokens, rows, or a gradient to compute take part all the same."""
    case = (tokens, 2, experts, torch.float32, 4)
    logs, sums = zip(*processes.run(_train, case, world=4, timeout=60), strict=True)
    notice, rows, weights = (torch.int64, 8), (torch.float32, WIDTH), (torch.float32, 1)
    layer = [notice, rows, weights, rows]
    agreement = (torch.int64, 1)  # once for a dispatcher
    assert logs[0] == [agreement, *3 * (2 * layer + 2 * [rows, rows, weights])]
    assert logs.count(logs[0]) == 4
    assert all(map(math.isfinite, sums))


def _backward_in_order(rank: int, world: int, fields: tuple, order: tuple) -> list[Tensor]:
    dispatcher = AllToAllDispatcher(num_experts=NUM_EXPERTS)
    inputs, results = [], []
    for number in range(3):
        x_TD, ids, weights_TK = Case(*fields).inputs(rank)
        inputs.append((x_TD.requires_grad_(), weights_TK.requires_grad_()))
        ids = torch.where(ids < 0, ids, (ids + number) % NUM_EXPERTS)
        dispatched = dispatcher.dispatch(x_TD, ids, weights_TK)
        y_RD = dispatched.rows_RD.exp() * dispatched.row_weights_R[:, None]
        results.append(dispatcher.combine(y_RD, dispatched.handle).square().sum())
        if not order:
            results[-1].backward()
    for number in order:
        results[number].backward()
    return [gradient(value) for pair in inputs for value in pair]


def test_live_dispatches_do_not_touch_each_other(processes):
    case = ((5, 0, 7, 1), 2, (-1, 0, 2, 3, 6), torch.float32, 5)
    alone = processes.run(_backward_in_order, case, (), world=4)
    for order in ((0, 1, 2), (2, 0, 1)):
        live = processes.run(_backward_in_order, case, order, world=4)
        for got, want in zip(live, alone, strict=True):
            assert all(map(torch.equal, got, want))


def _inner_products(rank: int, world: int, fields: tuple) -> tuple[float, float]:
    """<dispatch(x), u> here, and <x, its backward of u> here."""
    dispatcher = AllToAllDispatcher(num_experts=NUM_EXPERTS)
    x_TD, ids, weights_TK = Case(*fields).inputs(rank)
    dispatched = dispatcher.dispatch(x_TD.requires_grad_(), ids, weights_TK)
    u_RD = torch.randn_like(dispatched.rows_RD)
    combined = dispatcher.combine(u_RD, dispatched.handle)
    dispatched.rows_RD.backward(u_RD)
    assert torch.equal(gradient(x_TD), combined)
    return (dispatched.rows_RD * u_RD).sum().item(), (x_TD * combined).sum().item()


def test_combine_is_the_adjoint_of_dispatch(processes):
    case = ((5, 0, 3, 7), 3, (-1, 0, 1, 2, 5, 6), torch.float64, 6)
    left, right = zip(*processes.run(_inner_products, case, world=4), strict=True)
    assert abs(sum(left)) > 1e-3
    assert sum(left) == pytest.approx(sum(right), rel=1e-12)


def _return_own_tokens(rank: int, world: int, parts: list[Tensor]) -> Tensor:
    dispatcher = AllToAllDispatcher(num_experts=NUM_EXPERTS)
    x_TD = parts[rank].reshape(-1, 1)
    ids = (x_TD.long() * 5 + torch.tensor([0, 3])) % NUM_EXPERTS
    dispatched = dispatcher.dispatch(x_TD, ids, torch.full(ids.shape, 0.5))
    y_RD = dispatched.rows_RD * dispatched.row_weights_R[:, None]
    return dispatcher.combine(y_RD, dispatched.handle).view(parts[rank].shape)


def test_every_token_comes_home(processes):
    """The value of a token is its global id: 3 sequences of 10 cut in two, and ragged ranks."""
    sequences = torch.arange(30.0).view(3, 10)
    for parts in (sequences.split([5, 5], dim=1), sequences.split([7, 3], dim=1)):
        for got, sent in zip(
            processes.run(_return_own_tokens, list(parts), world=2), parts, strict=True
        ):
            assert torch.equal(got, sent)


def _bias_alone(rank: int, world: int) -> tuple[float, float]:
    dispatcher = AllToAllDispatcher(num_experts=NUM_EXPERTS)
    case = Case((3, 5, 2, 4), 3, tuple(range(NUM_EXPERTS)), torch.float32, seed=8)
    x_TD, ids, weights_TK = case.inputs(rank)
    bias_ED = torch.ones(NUM_EXPERTS, WIDTH, requires_grad=True)
    dispatched = dispatcher.dispatch(x_TD, ids, weights_TK)
    y_RD = apply_experts(
        dispatched, dispatcher.local_experts, torch.zeros(NUM_EXPERTS, WIDTH), bias_ED
    )
    y_TD = dispatcher.combine(y_RD, dispatched.handle)
    y_TD.sum().backward()
    torch.testing.assert_close(y_TD, weights_TK.sum(1, keepdim=True).expand(y_TD.shape))
    return gradient(bias_ED).sum().item(), WIDTH * weights_TK.sum().item()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_bias_of_an_expert_counts_once(processes, world):
    grads, weights = zip(*processes.run(_bias_alone, world=world), strict=True)
    assert sum(grads) == pytest.approx(sum(weights), rel=1e-5)


def _without_gradient(rank: int, world: int) -> bool:
    dispatcher = AllToAllDispatcher(num_experts=NUM_EXPERTS)
    with torch.no_grad():
        dispatched = dispatcher.dispatch(
            torch.ones(2, 3), torch.tensor([[0], [7]]), torch.ones(2, 1)
        )
        return dispatcher.combine(dispatched.rows_RD, dispatched.handle).requires_grad


def test_no_grad_is_respected(processes):
    assert processes.run(_without_gradient, world=2) == [False, False]


@dataclass(frozen=True)
class _Layers:
    """Tokens through one mixture of experts after another."""

    dispatcher: Dispatcher
    parameters: list[Tensor]

    def __call__(self, x_TD: Tensor, ids: Tensor, weights_TK: Tensor) -> Tensor:
        for scale_ED, bias_ED in zip(self.parameters[::2], self.parameters[1::2], strict=True):
            dispatched = self.dispatcher.dispatch(x_TD, ids, weights_TK)
            y_RD = apply_experts(dispatched, self.dispatcher.local_experts, scale_ED, bias_ED)
            x_TD = self.dispatcher.combine(y_RD, dispatched.handle)
        return x_TD


def _checkpoint(rank: int, world: int, fields: tuple, num_layers: int) -> None:
    """Gradients with the layers of a region recomputed must be those without."""
    results = []
    for early_stop in (None, True, False):
        torch.manual_seed(0)
        dispatcher = AllToAllDispatcher(num_experts=NUM_EXPERTS)
        parameters = [
            torch.randn(NUM_EXPERTS, WIDTH, requires_grad=True) for _ in range(2 * num_layers)
        ]
        layers = _Layers(dispatcher, parameters)
        x_TD, ids, weights_TK = Case(*fields).inputs(rank)
        x_TD.requires_grad_()
        if early_stop is None:
            y_TD = layers(x_TD, ids, weights_TK)
        else:
            with set_checkpoint_early_stop(early_stop):
                y_TD = checkpoint(layers, x_TD, ids, weights_TK, use_reentrant=False)
        y_TD.square().sum().backward()
        results.append([y_TD.detach(), *map(gradient, (x_TD, *parameters))])
    for recomputed in results[1:]:
        assert all(map(torch.equal, recomputed, results[0]))


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("tokens", [(3, 4, 0, 0), (0, 4, 0, 0), (0, 0, 0, 0)])
def test_checkpointed_layers_recompute_on_every_rank(processes, tokens, num_layers):
    """Rank 1 gets no rows: its experts save nothing that could ask for a recomputation."""
    case = (tokens, 2, (0, 3), torch.float32, 9)
    processes.run(_checkpoint, case, num_layers, world=2, timeout=60)
