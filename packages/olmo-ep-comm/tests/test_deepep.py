"""The adapter to DeepEP, against a stand-in with the library's signatures and known traps."""

import subprocess
import sys
import types
from typing import Any

import deep_ep_stand_in as stand_in
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_ep_comm import DeepEPDispatcher, Dispatched, Dispatcher, LocalDispatcher
from olmo_ep_comm._deepep_import import import_deepep
from pair_codecs import MXFP8
from torch import Tensor

WIDTH, NUM_EXPERTS, TOP_K, MAX_TOKENS = 256, 12, 3, 8
SLOPE = torch.linspace(-1, 1, WIDTH).bfloat16()


def make_inputs(seed: int, num_tokens: int, dropped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct experts a token, never the last one; `dropped`: some slots have no route."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, NUM_EXPERTS - 1, generator=generator)
    weights_TK, ids = scores.topk(TOP_K)
    if dropped and num_tokens:
        ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
        ids[0] = -1
    x_TD = torch.randn(num_tokens, WIDTH, generator=generator).bfloat16()
    return x_TD, ids, weights_TK


def experts(sent: Dispatched, first: int) -> Tensor:
    """Each expert scales its rows by its own power of two; undefined rows get NaN."""
    y_RD = sent.rows_RD * sent.row_weights_R[:, None].to(sent.rows_RD.dtype)
    factor_R, start = torch.full((len(y_RD), 1), float("nan")), 0
    for expert, end in enumerate(sent.offsets_E.tolist(), start=first):
        factor_R[start:end] = 2.0 ** (expert % 4)
        start = end
    return y_RD * factor_R.to(y_RD.dtype)


def run_layer(dispatcher: Dispatcher, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    x_TD, ids, weights_TK = inputs
    x_TD, weights_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    sent = dispatcher.dispatch(x_TD, ids, weights_TK)
    y_TD = dispatcher.combine(experts(sent, dispatcher.local_experts.start), sent.handle)
    y_TD.backward(SLOPE.expand(y_TD.shape))
    assert x_TD.grad is not None
    assert weights_TK.grad is not None
    end = int(sent.offsets_E[-1])
    return {
        "ends": sent.offsets_E,
        "rows": sent.rows_RD[:end].detach(),
        "row weights": sent.row_weights_R[:end].detach(),
        "y": y_TD.detach(),
        "x gradient": x_TD.grad,
        "weight gradient": weights_TK.grad,
    }


def part_of(whole: dict[str, Tensor], tokens: list[int], rank: int) -> dict[str, Tensor]:
    share = NUM_EXPERTS // len(tokens)
    ends = [0, *whole["ends"].tolist()]
    rows = slice(ends[rank * share], ends[(rank + 1) * share])
    mine = {
        name: whole[name].split(tokens)[rank] for name in ("y", "x gradient", "weight gradient")
    }
    mine |= {name: whole[name][rows] for name in ("rows", "row weights")}
    return mine | {"ends": whole["ends"][rank * share : (rank + 1) * share] - rows.start}


def make_dispatcher(version: str = "2.1", **options: Any) -> DeepEPDispatcher:
    sys.modules["deep_ep"] = stand_in.make_module(version)
    options = {"max_tokens": MAX_TOKENS, "width": WIDTH, "top_k": TOP_K, **options}
    return DeepEPDispatcher(num_experts=NUM_EXPERTS, **options)


def _compare(rank: int, world: int, version: str, cases: list[tuple]) -> None:
    with make_dispatcher(version) as dispatcher:
        for seed, tokens, dropped in cases:
            parts = [make_inputs(seed + other, tokens[other], dropped) for other in range(world)]
            whole = tuple(torch.cat(part) for part in zip(*parts, strict=True))
            want = part_of(run_layer(LocalDispatcher(num_experts=NUM_EXPERTS), whole), tokens, rank)
            got = run_layer(dispatcher, parts[rank])
            for name in ("ends", "rows", "row weights", "weight gradient"):
                assert torch.equal(got[name], want[name]), (name, version, tokens)
            # Three roundings of 2^-9, each of at most the sum of what is added.
            x_TD, _, weights_TK = parts[rank]
            addends_T1 = 8 * weights_TK.sum(1, keepdim=True)
            for name, values in (("y", x_TD.float()), ("x gradient", SLOPE.float())):
                error = (got[name].float() - want[name].float()).abs()
                assert (error <= 2.0**-7 * addends_T1 * values.abs()).all(), name
            assert (got["weight gradient"][parts[rank][1] < 0] == 0).all()
            unrouted_T = (parts[rank][1] < 0).all(1)
            assert (got["x gradient"][unrouted_T] == 0).all()
            assert (got["y"][unrouted_T] == 0).all()


@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 99),
    tokens=st.lists(st.integers(0, MAX_TOKENS), min_size=4, max_size=4),
    dropped=st.booleans(),
    version=st.sampled_from(["2.0", "2.1"]),
)
def test_any_routes_equal_one_process(processes, seed, tokens, dropped, version):
    for world in (2, 4):
        processes.run(_compare, version, [(seed, tokens[:world], dropped)], world=world)


@pytest.mark.dist
@pytest.mark.parametrize("version", ["2.0", "2.1"])
def test_extreme_loads_equal_one_process(processes, version):
    processes.run(_compare, version, [(1, [5], True), (2, [0], False)], world=1)
    cases = [(3, [8, 0, 1], True), (4, [0, 0, 0], False), (5, [0, 8, 8], False)]
    processes.run(_compare, version, cases, world=3)


LAYOUT = ([0, 2], [1, 3])


def _compare_in_sub_groups(rank: int, world: int) -> None:
    """Two groups of fresh processes at once, each with the ranks and time-outs it was given."""
    groups = [dist.new_group(ranks) for ranks in LAYOUT]
    (place,) = [i for i, ranks in enumerate(LAYOUT) if rank in ranks]
    ranks, group = LAYOUT[place], groups[place]
    tokens = [4 + other for other in ranks]
    options = {"group": group, "cpu_timeout_s": 17, "gpu_timeout_s": 19 + place}
    assert group._get_sequence_number_for_group() == 0, "the stand-in would not see a missing one"
    with make_dispatcher(**options) as dispatcher:
        buffer = dispatcher._buffer
        assert buffer.group is group
        assert (buffer.rank_idx, buffer.num_ranks) == (ranks.index(rank), 2)
        assert (buffer.num_cpu_timeout_secs, buffer.num_gpu_timeout_secs) == (17, 19 + place)
        parts = [make_inputs(other, 4 + other, True) for other in ranks]
        whole = tuple(torch.cat(part) for part in zip(*parts, strict=True))
        whole_layer = run_layer(LocalDispatcher(num_experts=NUM_EXPERTS), whole)
        want = part_of(whole_layer, tokens, ranks.index(rank))
        got = run_layer(dispatcher, parts[ranks.index(rank)])
        for name in ("ends", "rows", "row weights", "weight gradient"):
            assert torch.equal(got[name], want[name]), name


@pytest.mark.dist
def test_each_group_has_a_buffer_of_its_own(processes):
    processes.run(_compare_in_sub_groups, world=4)


def _make_where_it_cannot_be(rank: int, world: int) -> list[str]:
    """Rank 1 alone has a bad argument, or another library."""
    told = []
    for version, options in (
        ("2.1", {"width": 100}),
        ("2.1", {"gpu_timeout_s": 0}),
        ("v1", {}),
    ):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            make_dispatcher(*((version,) if rank else ()), **(options if rank else {}))
        told.append(str(caught.value))
    make_dispatcher().close()
    return told


@pytest.mark.dist
def test_a_dispatcher_that_one_rank_cannot_make_is_made_by_none(processes):
    first, second = processes.run(_make_where_it_cannot_be, world=2)
    for message in first:
        assert "on every rank of the group, but its rank(s) [1] refused theirs" in message
    for message, want in zip(
        second,
        ("`width` must be a multiple of 256", "`gpu_timeout_s` must be at least 1", "is DeepEP v1"),
        strict=True,
    ):
        assert want in message


def _log_calls(rank: int, world: int) -> list[dict[str, Any]]:
    with make_dispatcher() as dispatcher:
        x_TD, ids, weights_TK = make_inputs(rank, 5 - rank, True)
        weights_TK.requires_grad_(rank == 0)  # rank 1 needs no gradient and takes part
        for _ in range(2):
            sent = dispatcher.dispatch(x_TD.T.contiguous().T, ids.int(), weights_TK)
            dispatcher.combine(experts(sent, 0), sent.handle).nan_to_num().sum().backward()
        return dispatcher._buffer.calls


@pytest.mark.dist
def test_the_calls_avoid_the_known_traps(processes):
    """One bound, no wait of the host, and a cached dispatch that repeats SMs and layout."""
    calls, others = processes.run(_log_calls, world=2)
    assert calls == others
    assert [call["call"] for call in calls] == 2 * ["dispatch", "combine", "dispatch", "combine"]
    assert [call["is_cached"] for call in calls if "is_cached" in call] == 2 * [False, True]
    assert {call["do_expand"] for call in calls if "do_expand" in call} == {True}
    assert {call["do_cpu_sync"] for call in calls if "do_cpu_sync" in call} == {False, None}
    assert {call["nmax"] for call in calls if "nmax" in call} == {MAX_TOKENS, None}
    assert all(call["num_sms"] > 0 for call in calls if "num_sms" in call)
    assert [call["has_weights"] for call in calls if "has_weights" in call] == 2 * [False, True]


def _send_pairs(rank: int, world: int) -> list[torch.dtype]:
    dispatcher = make_dispatcher(codec=MXFP8, backward_codec=MXFP8)
    x_TD, ids, weights_TK = make_inputs(rank, 6, True)
    parts = [make_inputs(other, 6, True) for other in range(world)]
    whole = tuple(torch.cat(part) for part in zip(*parts, strict=True))
    want = LocalDispatcher(num_experts=NUM_EXPERTS, codec=MXFP8).dispatch(*whole)
    got = dispatcher.dispatch(x_TD, ids, weights_TK.requires_grad_())
    end, start = int(got.offsets_E[-1]), int(want.offsets_E[NUM_EXPERTS // world - 1]) * rank
    assert torch.equal(got.rows_RD[:end], want.rows_RD[start : start + end])
    assert got.encoded is not None
    assert want.encoded is not None
    for mine, theirs in zip(got.encoded, want.encoded, strict=True):
        mine, theirs = mine.view(torch.uint8), theirs.view(torch.uint8)
        assert torch.equal(mine[:end], theirs[start : start + end])
    dispatcher.combine(
        got.rows_RD * got.row_weights_R[:, None].bfloat16(), got.handle
    ).sum().backward()
    assert weights_TK.grad is not None
    assert weights_TK.grad.isfinite().all()
    return [call["dtype"] for call in dispatcher._buffer.calls if call["call"] == "dispatch"]


@pytest.mark.dist
def test_pairs_travel_as_float8_with_packed_scales(processes):
    for dtypes in processes.run(_send_pairs, world=2):
        assert dtypes == [torch.float8_e4m3fn] * 2


def _live_forwards(rank: int, world: int, order: list[int]) -> list[Tensor]:
    dispatcher = make_dispatcher()
    inputs = [make_inputs(10 * number + rank, 4 + number, True) for number in range(2)]
    results, grads = [], []
    for x_TD, ids, weights_TK in inputs:
        sent = dispatcher.dispatch(x_TD.requires_grad_(), ids, weights_TK.requires_grad_())
        results.append(dispatcher.combine(experts(sent, 0), sent.handle).sum())
        if not order:
            results[-1].backward()
    for number in order:
        results[number].backward()
    for x_TD, _, weights_TK in inputs:
        assert x_TD.grad is not None
        assert weights_TK.grad is not None
        grads += [x_TD.grad, weights_TK.grad]
    return grads


@pytest.mark.dist
def test_live_forwards_do_not_touch_each_other(processes):
    alone = processes.run(_live_forwards, [], world=2)
    for order in ([0, 1], [1, 0]):
        for got, want in zip(processes.run(_live_forwards, order, world=2), alone, strict=True):
            assert all(map(torch.equal, got, want))


def _disagree(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=r"must be the same on every rank.*\[12, 5, .*\[12, 8, "):
        make_dispatcher(max_tokens=8 if rank else 5)


@pytest.mark.dist
def test_ranks_must_agree_on_the_bound(processes):
    processes.run(_disagree, world=2, timeout=60)


def _refuse(rank: int, world: int) -> None:
    dispatcher = make_dispatcher()
    x_TD, ids, weights_TK = make_inputs(0, 4, False)
    refused = [
        ((x_TD.float(), ids, weights_TK), TypeError, "must be torch.bfloat16 for DeepEP, got"),
        ((x_TD, ids, weights_TK.double()), TypeError, "must be torch.float32 for DeepEP, got"),
        ((x_TD[:, :8], ids, weights_TK), ValueError, r"`width`=256 .* got x \(4, 8\)"),
        ((x_TD, ids[:, :2], weights_TK[:, :2]), ValueError, r"`top_k`=3 .* ids \(4, 2\)"),
        (tuple(v.repeat(3, 1) for v in (x_TD, ids, weights_TK)), ValueError, "`max_tokens`=8"),
        ((x_TD, ids * 0 + 3, weights_TK), ValueError, "must not name an expert twice"),
        ((x_TD, ids + 20, weights_TK), ValueError, "got an id outside"),
    ]
    for inputs, error, message in refused:
        with pytest.raises(error, match=message):
            dispatcher.dispatch(*inputs)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="fill_uninitialized_memory` must be False"):
            dispatcher.dispatch(x_TD, ids, weights_TK)
    finally:
        torch.use_deterministic_algorithms(False)
    assert dispatcher._buffer.calls == []
    sent = dispatcher.dispatch(x_TD.requires_grad_(), ids, weights_TK)
    y_TD = dispatcher.combine(sent.rows_RD, sent.handle)
    dispatcher.close()
    dispatcher.close()
    for late in (lambda: y_TD.sum().backward(), lambda: dispatcher.dispatch(x_TD, ids, weights_TK)):
        with pytest.raises(RuntimeError, match="`DeepEPDispatcher` is closed"):
            late()
    for options, message in (
        ({"width": 2880}, "multiple of 256 for DeepEP, got 2880"),
        ({"top_k": 33}, r"`top_k` must be in \[1, 32\]"),
        ({"max_tokens": 0}, "`max_tokens` must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            make_dispatcher(**options)


@pytest.mark.dist
def test_what_deepep_cannot_do_is_refused_before_any_call(processes):
    processes.run(_refuse, world=1)


@pytest.mark.parametrize(
    ("version", "message"),
    [("v1", "is DeepEP v1; install v2"), ("hybrid-ep", "is the hybrid-ep branch; install v2")],
)
def test_another_library_of_that_name_is_named(monkeypatch, version, message):
    monkeypatch.setitem(sys.modules, "deep_ep", stand_in.make_module(version))
    with pytest.raises(RuntimeError, match=message):
        import_deepep()


def test_an_unknown_module_of_that_name_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", types.ModuleType("deep_ep"))
    with pytest.raises(RuntimeError, match="is none that is known"):
        import_deepep()


@pytest.mark.parametrize(
    "statement",
    ["assert False, 'NCCL differs'", "raise TypeError('no CUDA')", "import no_such_module"],
)
def test_a_library_that_does_not_load_says_what_it_needs(monkeypatch, tmp_path, statement):
    (tmp_path / "deep_ep.py").write_text(statement)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    with pytest.raises(
        RuntimeError, match=r"cannot be imported: \w+Error: .*NCCL 2\.30\.4"
    ) as caught:
        import_deepep()
    assert caught.value.__cause__ is not None
    assert "deep_ep" not in sys.modules  # a failure is not remembered


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    with pytest.raises(RuntimeError, match="there is no module `deep_ep`; install"):
        import_deepep()


def test_importing_the_package_leaves_deepep_alone(tmp_path):
    """The same process imports it afterwards: the check could have failed."""
    (tmp_path / "deep_ep.py").write_text("raise SystemExit('imported')")
    code = "import olmo_ep_comm; print('package'); import deep_ep"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout == "package\n"
    assert "imported" in done.stderr
