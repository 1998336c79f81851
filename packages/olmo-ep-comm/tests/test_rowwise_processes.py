"""The one-sided exchange between processes, which write into each other's memory for real."""

import random
import time

import pytest
import rowwise_ranks
import torch
import torch.distributed as dist
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from olmo_ep_comm import PairCodec, RowwiseDispatcher, create_dispatcher
from olmo_ep_comm._rowwise import moves
from pair_codecs import CAST
from rowwise_problem import Problem, assert_equal_local, expert_results, loss_of, run_local
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.dist
LAYOUTS = ([[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]])


def make_dispatcher(case: Problem, group: dist.ProcessGroup | None = None, **options):
    num_ranks = dist.get_world_size(group)
    rows = num_ranks * max(*case.tokens, 1) * case.top_k
    return RowwiseDispatcher(
        num_experts=case.num_experts,
        group=group,
        max_tokens=max(*case.tokens, 1),
        width=case.width,
        top_k=case.top_k,
        dtype=case.dtype,
        capacity=rows,
        admit=lambda requested, capacity: requested,
        **options,
    )


def run_layer(dispatcher: RowwiseDispatcher, case: Problem, rank: int) -> dict[str, Tensor]:
    x_TD, ids, weights_TK = case.inputs(rank)
    x_TD, weights_TK = x_TD.requires_grad_(), weights_TK.requires_grad_()
    sent = dispatcher.dispatch(x_TD, ids, weights_TK)
    end = int(sent.offsets_E[-1])
    seen = {"rows": sent.rows_RD[:end].detach().clone()}
    seen["row weights"] = sent.row_weights_R[:end].detach()
    y_TD = dispatcher.combine(expert_results(sent, dispatcher.local_experts), sent.handle)
    loss_of([y_TD]).backward()
    assert x_TD.grad is not None
    assert weights_TK.grad is not None
    gradients = {"x gradient": x_TD.grad, "weight gradient": weights_TK.grad}
    return {"ends": sent.offsets_E, "y": y_TD.detach(), **seen, **gradients}


def _compare(
    rank: int, world: int, tokens: list[int], top_k: int, seed: int, dtype: torch.dtype
) -> None:
    case = Problem(tokens=tuple(tokens), num_experts=8, top_k=top_k, seed=seed, dtype=dtype)
    for layout in LAYOUTS:
        groups = [dist.new_group(ranks) for ranks in layout]
        (place,) = [i for i, ranks in enumerate(layout) if rank in ranks]
        ranks, group = layout[place], groups[place]
        assert isinstance(group, dist.ProcessGroup)
        want = run_local(8, [case.inputs(other) for other in ranks])[ranks.index(rank)]
        sums = []
        for combine_by in ("put", "get"):
            dispatcher = make_dispatcher(case, group, combine_by=combine_by)
            for _ in range(2):
                got = run_layer(dispatcher, case, rank)
                assert_equal_local(got, want, exact=top_k == 1 or len(ranks) == 1)
            sums.append([got["y"], got["x gradient"]])
        assert all(map(torch.equal, *sums))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=2, deadline=None, phases=[Phase.explicit, Phase.generate])
@example(tokens=[5, 0, 6, 3], top_k=3, seed=1)
@given(
    tokens=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    top_k=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
def test_any_group_equals_one_process(processes, dtype, tokens, top_k, seed):
    processes.run(_compare, tokens, top_k, seed, dtype, world=4, timeout=120)


@pytest.mark.parametrize("combine_by", ["put", "get"])
def test_drops_are_those_of_the_policy_and_counted(processes, combine_by):
    first, second = processes.run(
        rowwise_ranks.drop_what_has_no_room, "cpu", combine_by, world=2, timeout=120
    )
    assert all(map(sum, zip(first, second, strict=True)))
    assert sum(first) > 0
    assert sum(second) > 0


@pytest.mark.parametrize("combine_by", ["put", "get"])
def test_two_forwards_alive_are_as_each_alone(processes, combine_by):
    run = rowwise_ranks.keep_two_forwards_alive
    processes.run(run, "cpu", combine_by, world=2, timeout=120)


def test_two_dispatchers_used_in_turn_are_as_each_alone(processes):
    processes.run(rowwise_ranks.use_two_dispatchers_in_turn, "cpu", world=2, timeout=120)


def _stress(rank: int, world: int, rounds: int, recompute: bool) -> None:
    """Two layers on one dispatcher, routes that change, and ranks that are late at every step."""
    late = random.Random(rank)
    case = Problem(tokens=(6, 3, 0), num_experts=6, top_k=3)
    dispatcher = make_dispatcher(case, live_forwards=1 if recompute else 4)

    def delay() -> None:
        time.sleep(late.choice([0, 0, 0.001, 0.004]))

    barrier = dispatcher._buffers.memory.barrier

    def delayed_barrier() -> None:
        delay()
        barrier()
        delay()

    dispatcher._buffers.memory.barrier = delayed_barrier

    def block(x_TD: Tensor, ids: Tensor, weights_TK: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x_TD, ids, weights_TK)
        delay()
        y_RD = expert_results(sent, dispatcher.local_experts)
        return dispatcher.combine(y_RD, sent.handle)

    for number in range(rounds):
        cases = [
            Problem(tokens=case.tokens, num_experts=6, top_k=3, seed=2 * number + i)
            for i in range(2)
        ]
        leaves, results = [], []
        for one in cases:
            x_TD, ids, weights_TK = one.inputs(rank)
            leaves.append(x_TD.requires_grad_())
            for _ in range(2):
                if recompute:
                    x_TD = checkpoint(block, x_TD, ids, weights_TK, use_reentrant=False)
                else:
                    x_TD = block(x_TD, ids, weights_TK)
            results.append(x_TD)
        for i in (0, 1) if number % 2 else (1, 0):
            loss_of([results[i]]).backward()
        for one, leaf, result in zip(cases, leaves, results, strict=True):
            y, grad = two_layers_alone(one, rank)
            torch.testing.assert_close(result, y, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(leaf.grad, grad, rtol=1e-4, atol=1e-4)


def two_layers_alone(case: Problem, rank: int) -> tuple[Tensor, Tensor]:
    """Return what one token after another makes of both layers, without any dispatcher."""
    x_TD, ids, weights_TK = case.inputs(rank)
    leaf = x_TD.clone().requires_grad_()
    value = leaf
    for _ in range(2):
        factor_TK = torch.where(ids >= 0, 0.5 + ids % 5, 0.0) * weights_TK
        value = (value[:, None] * factor_TK[..., None] + factor_TK[..., None]).sum(1)
    loss_of([value]).backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


@pytest.mark.parametrize("recompute", [False, True])
def test_late_ranks_never_meet_overwritten_rows(processes, recompute):
    processes.run(_stress, 12, recompute, world=3, timeout=120)


class LateReader:
    """The moves of a rank that is late to read the sums it got."""

    def __getattr__(self, name):
        return getattr(moves, name)

    def add_sums(self, *arguments):
        time.sleep(0.2)
        return moves.add_sums(*arguments)

    def get_sums(self, *arguments):
        time.sleep(0.2)
        return moves.get_sums(*arguments)


def _combine_twice(rank: int, world: int, keep_rule: bool, combine_by: str) -> bool:
    """Two combines in a row, without the first barrier of each unless `keep_rule`."""
    case = Problem(tokens=(4, 4), num_experts=2, top_k=1, experts=(0,))
    dispatcher = make_dispatcher(case, live_forwards=2, combine_by=combine_by)
    memory, barrier = dispatcher._buffers.memory, dispatcher._buffers.memory.barrier
    if rank == 1:
        object.__setattr__(dispatcher._buffers.settings, "moves", LateReader())
    calls = 0

    def every_second_barrier() -> None:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            barrier()

    x_TD, ids, weights_TK = case.inputs(rank)
    with torch.no_grad():
        sent = [dispatcher.dispatch(x_TD, ids, weights_TK) for _ in range(2)]
        if not keep_rule:
            memory.barrier = every_second_barrier
        first, second = (
            dispatcher.combine(torch.full_like(part.rows_RD, value), part.handle)
            for value, part in enumerate(sent, start=1)
        )
    return bool((first == 1).all() and (second == 2).all())


@pytest.mark.parametrize("combine_by", ["put", "get"])
def test_the_write_after_read_rule_is_kept_and_needed(processes, combine_by):
    assert processes.run(_combine_twice, True, combine_by, world=2, timeout=60) == [True, True]
    assert processes.run(_combine_twice, False, combine_by, world=2, timeout=60) == [True, False]


def _meet_faults(rank: int, world: int) -> list[str]:
    """Faults of rank 1 alone, of both, and none: what this rank was told, each in turn."""
    case = Problem(tokens=(3, 3), num_experts=4, top_k=2)
    dispatcher = make_dispatcher(case, live_forwards=1)
    x_TD, ids, weights_TK = case.inputs(rank)
    far = torch.where(ids == ids[0, 0], 4, ids)
    told = []
    for at_fault, inputs in (
        ({1}, (x_TD, far, weights_TK)),
        ({1}, (x_TD, ids - 2**33, weights_TK)),
        ({1}, (x_TD.bfloat16(), ids, weights_TK)),
        ({1}, (torch.cat([x_TD] * 2), torch.cat([ids] * 2), torch.cat([weights_TK] * 2))),
        ({0, 1}, (x_TD, ids, weights_TK.double())),
    ):
        given = inputs if rank in at_fault else (x_TD, ids, weights_TK)
        try:
            dispatcher.dispatch(*given)
        except (TypeError, ValueError) as error:
            told.append(f"{type(error).__name__} {error}")
            time.sleep(0.02 * rank)
            with torch.no_grad():  # still within the handler: no lease is held
                sent = dispatcher.dispatch(x_TD, ids, weights_TK)
                y_TD = dispatcher.combine(
                    expert_results(sent, dispatcher.local_experts), sent.handle
                )
            del sent
            want = run_local(4, [case.inputs(other) for other in range(2)])[rank]["y"]
            torch.testing.assert_close(y_TD, want, rtol=1e-5, atol=1e-5)
    encoding = make_dispatcher(case, codec=PairCodec(encode=encode_finite, decode=decode_bytes))
    for factor in (float("inf"), 1.0):
        scaled = (x_TD.abs() * factor) if rank else x_TD.abs()
        try:
            sent = encoding.dispatch(scaled, ids, weights_TK)
        except (ArithmeticError, ValueError) as error:
            told.append(f"{type(error).__name__} {error}")
    del sent
    held = dispatcher.dispatch(x_TD, ids, weights_TK) if rank else None
    if not rank:
        with torch.no_grad():
            sent = dispatcher.dispatch(x_TD, ids, weights_TK)
            del sent
    try:
        dispatcher.dispatch(x_TD, ids, weights_TK)
    except (RuntimeError, ValueError) as error:
        told.append(f"{type(error).__name__} {error}")
    del held
    return told


def encode_finite(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    if not x_TD.isfinite().all():
        raise ArithmeticError("a value is not finite")
    return x_TD.to(torch.uint8), torch.zeros(len(x_TD), 1, dtype=torch.uint8)


def decode_bytes(data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return data.to(dtype)


def test_a_fault_of_one_rank_is_told_to_all_and_leaves_the_dispatcher_usable(processes):
    first, second = processes.run(_meet_faults, world=2, timeout=60)
    assert len(first) == len(second) == 7
    elsewhere = "ValueError `dispatch` must get valid inputs on every rank of the group, but its "
    elsewhere += "rank(s) [1] refused theirs; read the error there. No rows were sent."
    assert first[:4] == [elsewhere] * 4
    assert first[5:] == [elsewhere] * 2
    assert first[4].startswith("TypeError `weights_TK` must be torch.float32, got torch.float64")
    unknown = "ValueError `expert_ids_TK` must hold ids in [0, `num_experts`=4)"
    for message, start in zip(
        second,
        (
            unknown,
            unknown,
            "TypeError `x_TD` must have the `dtype` of the dispatcher",
            "ValueError `dispatch` must get at most `max_tokens`=3",
            "TypeError `weights_TK` must be torch.float32",
            "ArithmeticError a value is not finite",
            "RuntimeError `live_forwards` must be at least",
        ),
        strict=True,
    ):
        assert message.startswith(start)


def _learn_alone(rank: int, world: int, combine_by: str) -> list[Tensor]:
    """Rank 1 has nothing that needs a gradient and no rows: its experts return a fresh tensor."""
    case = Problem(tokens=(3, 2), num_experts=4, top_k=2, experts=(0, 1))
    dispatcher = make_dispatcher(case, combine_by=combine_by)
    x_TD, ids, weights_TK = case.inputs(rank)
    x_TD.requires_grad_(rank == 0)
    barriers, barrier = [], dispatcher._buffers.memory.barrier
    dispatcher._buffers.memory.barrier = lambda: barriers.append(barrier())
    for _ in range(2):
        sent = dispatcher.dispatch(x_TD, ids, weights_TK)
        y_RD = expert_results(sent, dispatcher.local_experts)
        assert (sent.offsets_E[-1] == 0) == bool(rank)
        y_RD = torch.zeros_like(sent.rows_RD).detach() if rank else y_RD
        loss_of([dispatcher.combine(y_RD, sent.handle)]).backward()
    assert len(barriers) == 2 * 8
    return [torch.empty(0) if x_TD.grad is None else x_TD.grad]


@pytest.mark.parametrize("combine_by", ["put", "get"])
def test_a_rank_that_learns_nothing_takes_part_in_every_exchange(processes, combine_by):
    (grad,), _ = processes.run(_learn_alone, combine_by, world=2, timeout=60)
    case = Problem(tokens=(3, 2), num_experts=4, top_k=2, experts=(0, 1))
    want = run_local(4, [case.inputs(rank) for rank in range(2)])[0]["x gradient"]
    torch.testing.assert_close(grad, 2 * want)


def _make_where_it_cannot_be(rank: int, world: int) -> list[str]:
    """Rank 1 alone has a bad argument, no memory, or files that the others do not see."""
    sizes = {"num_experts": 4, "max_tokens": 4, "width": 8, "top_k": 2}
    told = []

    def make(**options) -> RowwiseDispatcher:
        return RowwiseDispatcher(**{**sizes, **(options if rank else {})})

    for wrong in ({"width": 7}, {"num_experts": 5}, {"impl": "none"}, {"dtype": torch.half}):
        with pytest.raises((TypeError, ValueError)) as caught:
            make(**wrong)
        told.append(str(caught.value))

    def no_room(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    for name, wrong in (
        ("os.posix_fallocate", no_room),
        ("pathlib.Path.is_file", lambda path: not path.name.startswith("olmo-ep-comm-")),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if rank:
                patch.setattr(name, wrong)
            with pytest.raises(RuntimeError) as caught:
                make()
        told.append(str(caught.value))
    make()
    return told


def test_a_dispatcher_that_one_rank_cannot_make_is_made_by_none(processes):
    first, second = processes.run(_make_where_it_cannot_be, world=2, timeout=60)
    for message in first[:4]:
        assert "on every rank of the group, but its rank(s) [1] refused theirs" in message
    starts = ("`width` must be", "`num_experts` must be", "`impl` must be", "`dtype` must be")
    for message, start in zip(second[:4], starts, strict=True):
        assert message.startswith(start)
    for one, other in (first[4:], second[4:]):
        assert "rank(s) [1] of the group found no room for " in one
        assert "rank(s) [1] of the group do not see the files of the others" in other


def _refuse(rank: int, world: int) -> str:
    with pytest.raises(ValueError, match="must be the same on every rank") as caught:
        RowwiseDispatcher(num_experts=4, max_tokens=4 + rank, width=8, top_k=2)
    for name in ("codec", "backward_codec"):  # one without scales is one, too
        with pytest.raises(ValueError, match="must be the same on every rank"):
            RowwiseDispatcher(
                num_experts=4, max_tokens=4, width=8, top_k=2, **{name: CAST if rank else None}
            )
    few = RowwiseDispatcher(num_experts=2, max_tokens=4, width=8, top_k=2)  # one expert a rank
    inputs = (torch.ones(4, 8).bfloat16(), torch.zeros(4, 2).long(), torch.ones(4, 2))
    for _ in range(2):
        with pytest.raises(ValueError, match="names an expert twice, 8, got more"):
            few.dispatch(*inputs)
    with pytest.raises(ValueError, match="it runs on CUDA, not on cpu; use impl='reference'"):
        RowwiseDispatcher(num_experts=4, max_tokens=4, width=8, top_k=2, impl="triton")
    options = {"max_tokens": 4, "width": 8, "top_k": 2}
    dispatcher = create_dispatcher("rowwise", num_experts=4, **options)
    assert isinstance(dispatcher, RowwiseDispatcher)
    assert dispatcher.local_experts == range(2 * rank, 2 * rank + 2)
    assert dispatcher.buffer_bytes["rows 0"] == 2 * 4 * 2 * 16
    return str(caught.value)


def test_ranks_must_agree_on_the_sizes(processes):
    first, second = processes.run(_refuse, world=2, timeout=60)
    assert first == second
    assert "[[4, 4, 8, 2, " in first
    assert "[4, 5, 8, 2, " in first
