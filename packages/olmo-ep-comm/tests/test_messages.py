"""What a caller is told, before anything runs."""

import sys
from typing import Any, cast

import deep_ep_stand_in as stand_in
import pytest
import torch
import torch.distributed as dist
from olmo_ep_comm import AllToAllDispatcher, LocalDispatcher, PairCodec, create_dispatcher

X = torch.ones(3, 4)
IDS = torch.zeros(3, 2, dtype=torch.int64)
WEIGHTS = torch.ones(3, 2)


@pytest.mark.parametrize(
    ("x", "ids", "weights", "error", "message"),
    [
        (X[0], IDS, WEIGHTS, ValueError, r"`x_TD` must have shape \(tokens, width\), got \(4,\)"),
        (
            X,
            IDS[:2],
            WEIGHTS,
            ValueError,
            r"`expert_ids_TK` must have shape \(3, K\).*got \(2, 2\)",
        ),
        (X, IDS[:, :0], WEIGHTS[:, :0], ValueError, r"K at least 1.*got \(3, 0\)"),
        (X, IDS[:, 0], WEIGHTS, ValueError, r"`expert_ids_TK` must have shape.*got \(3,\)"),
        (X, IDS, WEIGHTS[:, :1], ValueError, r"`weights_TK` must have the shape.*got \(3, 1\)"),
        (X.half(), IDS, WEIGHTS, TypeError, "`x_TD` must be torch.float32 or .*got torch.float16"),
        (X, IDS.float(), WEIGHTS, TypeError, "`expert_ids_TK` must be torch.int64 or torch.int32"),
        (X, IDS, WEIGHTS.bfloat16(), TypeError, "`weights_TK` must be torch.float32 or"),
        (
            X,
            IDS,
            WEIGHTS.to("meta"),
            ValueError,
            "`weights_TK` must be on the device of `x_TD`, cpu",
        ),
        ([1.0], IDS, WEIGHTS, TypeError, "`x_TD` must be a tensor, got a list"),
        (X, IDS, None, TypeError, "`weights_TK` must be a tensor, got a NoneType"),
        (X, IDS + 6, WEIGHTS, ValueError, r"ids in \[0, `num_experts`=6\), or -1"),
        (X, IDS - 2, WEIGHTS, ValueError, r"ids in \[0, `num_experts`=6\), or -1"),
    ],
)
def test_dispatch_refuses(x, ids, weights, error, message):
    with pytest.raises(error, match=message):
        LocalDispatcher(num_experts=6).dispatch(x, ids, weights)


@pytest.mark.parametrize(
    ("y", "error", "message"),
    [
        (torch.ones(5, 4), ValueError, r"shape \(6, 4\), got \(5, 4\)"),
        (torch.ones(6, 3), ValueError, r"shape \(6, 4\), got \(6, 3\)"),
        (torch.ones(6, 4).double(), TypeError, r"dtype of the dispatched rows, torch.float32, got"),
    ],
)
def test_combine_refuses(y, error, message):
    dispatcher = LocalDispatcher(num_experts=6)
    handle = dispatcher.dispatch(X, IDS, WEIGHTS).handle
    with pytest.raises(error, match=message):
        dispatcher.combine(y, handle)


def test_combine_refuses_what_is_no_handle():
    with pytest.raises(TypeError, match="`handle` must come from `dispatch`, got NoneType"):
        LocalDispatcher(num_experts=6).combine(torch.ones(6, 4), None)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"backend": "a2a"},
            ValueError,
            '`backend` must be one of "local", "all_to_all", "rowwise", "deepep", got \'a2a\'',
        ),
        (
            {"backend": "local", "depth": 2, "align": 8},
            TypeError,
            'The backend "local" has the options `codec`, `backward_codec`, got `align`, `depth`',
        ),
        (
            {"backend": "deepep", "width": 256},
            TypeError,
            'The backend "deepep" needs the options `max_tokens`, `top_k`; give them',
        ),
        ({"backend": "local", "group": object()}, ValueError, "`group` must be None"),
        (
            {"backend": "local", "num_experts": 0},
            ValueError,
            "`num_experts` must be at least 1, got 0",
        ),
        (
            {"backend": "local", "codec": "mx"},
            TypeError,
            "`codec` must be a PairCodec or None, got 'mx'",
        ),
        ({"backend": "all_to_all"}, RuntimeError, "there is no default group; call"),
    ],
)
def test_create_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        create_dispatcher(**{"num_experts": 4, **arguments})


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


SIZES = {"max_tokens": 4, "width": 256, "top_k": 2}


@pytest.mark.parametrize("timeout_s", [0, -5.0, 0.0001, float("inf"), float("nan")])
def test_a_time_out_that_is_none_is_refused(group_of_one, timeout_s):
    with pytest.raises(ValueError, match=r"`timeout_s` must be finite and at least 0\.001 seconds"):
        create_dispatcher("rowwise", num_experts=4, **SIZES, timeout_s=timeout_s)
    with pytest.raises(TypeError, match="`timeout_s` must be a number of seconds, got '5'"):
        create_dispatcher("rowwise", num_experts=4, **SIZES, timeout_s="5")
    create_dispatcher("rowwise", num_experts=4, **SIZES, timeout_s=0.001)


@pytest.mark.parametrize("name", ["cpu_timeout_s", "gpu_timeout_s"])
def test_a_time_out_of_deepep_that_is_none_is_refused(group_of_one, name):
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        create_dispatcher("deepep", num_experts=4, **SIZES, **{name: 0})


@pytest.mark.parametrize("backend", ["rowwise", "deepep"])
def test_buffers_are_not_made_while_a_graph_is_captured(group_of_one, monkeypatch, backend):
    monkeypatch.setitem(sys.modules, "deep_ep", stand_in.make_module("2.1"))
    create_dispatcher(backend, num_experts=4, **SIZES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="Dispatcher` must be made outside of a CUDA graph: it"):
        create_dispatcher(backend, num_experts=4, **SIZES)


def test_create_local():
    dispatcher = create_dispatcher("local", num_experts=4)
    assert isinstance(dispatcher, LocalDispatcher)
    assert dispatcher.num_experts == 4


def _refuse_the_layout(rank: int, world: int) -> None:
    assert isinstance(create_dispatcher("all_to_all", num_experts=6), AllToAllDispatcher)
    with pytest.raises(ValueError, match=r"`num_experts` must be a multiple .* 3, got 7"):
        AllToAllDispatcher(num_experts=7)
    pair = torch.distributed.new_group([0, 2])
    if rank == 1:
        with pytest.raises(ValueError, match="`group` must contain this process"):
            create_dispatcher("all_to_all", num_experts=4, group=cast(Any, pair))
    else:
        assert isinstance(pair, torch.distributed.ProcessGroup)
        local = AllToAllDispatcher(num_experts=4, group=pair).local_experts
        assert local == (range(0, 2) if rank == 0 else range(2, 4))


@pytest.mark.dist
def test_layouts_that_do_not_fit_are_refused(processes):
    processes.run(_refuse_the_layout, world=3)


def encode(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not x_TD.isfinite().all():
        raise ArithmeticError("a value is not finite")
    return x_TD.to(torch.uint8), torch.zeros(len(x_TD), 1, dtype=torch.uint8)


def decode(data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return data.to(dtype)


def _meet_a_fault_of_rank_1(rank: int, world: int) -> list[str]:
    """Every kind of fault on one rank alone: no rank may hang, and the group works afterwards."""
    dispatcher = AllToAllDispatcher(num_experts=4, codec=PairCodec(encode=encode, decode=decode))
    faults = [
        (X, IDS + 4, WEIGHTS),
        (X, IDS - 2, WEIGHTS),
        (X, IDS[:2], WEIGHTS),
        (X.half(), IDS, WEIGHTS),
        (X / 0, IDS, WEIGHTS),
        (X, IDS.tolist(), WEIGHTS),
        (X[:, :3], IDS, WEIGHTS),
        (X.bfloat16(), IDS, WEIGHTS),
        (X, IDS, WEIGHTS.double()),
    ]
    messages = []
    for fault in faults:
        with pytest.raises(Exception, match=r"(must|not finite|attribute)") as caught:
            dispatcher.dispatch(*(fault if rank == 1 else (X, IDS, WEIGHTS)))
        messages.append(str(caught.value))
        dispatched = dispatcher.dispatch(X, IDS, WEIGHTS)
        assert torch.equal(dispatcher.combine(dispatched.rows_RD, dispatched.handle), X + X)
    return messages


@pytest.mark.dist
def test_a_fault_on_one_rank_is_raised_on_all(processes):
    rank0, rank1 = processes.run(_meet_a_fault_of_rank_1, world=2, timeout=60)
    for message in rank0[:6]:
        assert "but its rank(s) [1] refused theirs" in message
    assert ["an id outside" in message for message in rank1[:3]] == [True, True, False]
    assert "`expert_ids_TK` must have shape (3, K)" in rank1[2]
    assert "`x_TD` must be torch.float32" in rank1[3]
    assert rank1[4:6] == [
        "a value is not finite",
        "`expert_ids_TK` must be a tensor, got a list.",
    ]
    assert rank0[6:] == rank1[6:]
    form = "torch.float32 in 5 bytes, weights torch.float32"
    assert f"rank 0: width 4, {form}; rank 1: width 3" in rank0[6]
    assert "rank 1: width 4, torch.bfloat16" in rank0[7]
    assert "rank 1: width 4, torch.float32 in 5 bytes, weights torch.float64" in rank0[8]


def _disagree(rank: int, world: int, num_experts: list[int], bad_input: bool) -> list[str]:
    """Two dispatches of ranks whose numbers of experts differ: neither may hang or go through."""
    dispatcher = AllToAllDispatcher(num_experts=num_experts[rank])
    messages = []
    for _ in range(2):
        with pytest.raises(ValueError, match="`num_experts` must be the same") as caught:
            dispatcher.dispatch(X.half() if bad_input and rank == 0 else X, IDS, WEIGHTS)
        messages.append(str(caught.value))
    agreed = AllToAllDispatcher(num_experts=4)
    dispatched = agreed.dispatch(X, IDS, WEIGHTS)
    assert torch.equal(agreed.combine(dispatched.rows_RD, dispatched.handle), X + X)
    return messages


@pytest.mark.dist
@pytest.mark.parametrize("num_experts", [[4, 8], [2, 64]])
@pytest.mark.parametrize("bad_input", [False, True])
def test_ranks_must_agree_on_the_number_of_experts(processes, num_experts, bad_input):
    rank0, rank1 = processes.run(_disagree, num_experts, bad_input, world=2, timeout=60)
    assert rank0 == rank1
    assert f"got {num_experts} in rank order" in rank0[0]
