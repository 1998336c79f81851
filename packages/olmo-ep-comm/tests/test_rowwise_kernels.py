"""The kernels of the one-sided exchange against its moves in plain torch, bit for bit.

On a GPU, or in Triton's interpreter (`test_interpreter.py`), which has no bfloat16 arithmetic worth
trusting: there sums are tested in float32.
"""

import os
import subprocess
import sys
from typing import Literal

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from olmo_ep_comm import VirtualRowwise
from olmo_ep_comm._rowwise.memory import InProcessMemory, Shared, pointer_table
from pair_codecs import MXFP8
from rowwise_problem import Problem, expert_results, loss_of, run_virtual

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
GUARD = 64
PROGRAMS = ("LINK_PROGRAMS", "FETCH_PROGRAMS", "LOCAL_PROGRAMS")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs programs one after another; odd numbers of them divide nothing."""
    from olmo_ep_comm._triton import moves, plan

    if INTERPRETED:
        for name in PROGRAMS:
            monkeypatch.setattr(moves, name, 3)
        monkeypatch.setattr(moves, "_COLUMNS", 8)  # several blocks of columns a row
        monkeypatch.setattr(plan, "_ROUTES", 16)  # several blocks of routes
        monkeypatch.setattr(plan, "_BLOCKS", 2)  # several blocks of blocks
        monkeypatch.setattr(plan, "_CHUNK", 8)


def keep_fair(requested, capacity):
    """Keep three quarters of each cell; what does not fit is cut in row order."""
    return (3 * requested + 3) // 4


@st.composite
def problem(draw):
    num_ranks = draw(st.sampled_from([1, 2, 4]))
    num_experts = num_ranks * draw(st.integers(1, 2))
    tokens = draw(st.lists(st.integers(0, 5), min_size=num_ranks, max_size=num_ranks))
    chosen = draw(st.lists(st.integers(-1, num_experts - 1), min_size=1, max_size=6))
    return Problem(
        tokens=tuple(tokens),
        num_experts=num_experts,
        top_k=draw(st.integers(1, 4)),
        width=draw(st.sampled_from([8, 24, 40])),
        dtype=draw(st.sampled_from(DTYPES)),
        experts=tuple(chosen),
        seed=draw(st.integers(0, 99)),
    )


@example(case=Problem(tokens=(0, 0), num_experts=2, top_k=2), capacity=1, combine_by="put")
@example(
    case=Problem(tokens=(5, 0, 3, 1), num_experts=8, top_k=4, experts=(7,)),
    capacity=40,
    combine_by="get",
)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    case=problem(), capacity=st.sampled_from([3, 100]), combine_by=st.sampled_from(["put", "get"])
)
def test_every_result_equals_the_reference_bitwise(case, capacity, combine_by):
    inputs = [case.inputs(rank, DEVICE) for rank in range(len(case.tokens))]
    options = {"capacity": capacity, "admit": keep_fair, "device": DEVICE, "combine_by": combine_by}
    got = run_virtual(case.virtual(impl="triton", **options), inputs)
    want = run_virtual(case.virtual(impl="reference", **options), inputs)
    for mine, reference in zip(got, want, strict=True):
        for name, value in reference.items():
            assert torch.equal(mine[name], value), name


def plans(case: Problem, ids: list[torch.Tensor], impl: str, **options) -> list[torch.Tensor]:
    """Return all that requests and plans leave behind, of every rank."""
    layer = case.virtual(impl=impl, device=DEVICE, **options)
    buffers, form = layer._buffers, layer._buffers.settings.form
    moves = buffers.settings.moves
    for own in (*buffers.counts.own, *buffers.meta.own):
        own.fill_(-9)
    requests = [
        moves.put_requests(buffers.counts, rank, one, 5 + rank, form)
        for rank, one in enumerate(ids)
    ]
    left = []
    for rank, one in enumerate(ids):
        weights_TK = case.inputs(rank, DEVICE)[2]
        plan, ends_L, is_sound = moves.put_plan(
            *(buffers.meta, rank, requests[rank], weights_TK, buffers.counts.own[rank]),
            *(buffers.settings.admit if "admit" in options else None, form),
        )
        left += [plan.rank_TK, plan.row_TK, plan.next_TK, plan.sum_TK, plan.num_sums_T]
        left += [plan.num_dropped, ends_L, is_sound]
        assert len(one) == len(plan.num_sums_T)
    return [*left, *buffers.counts.own, *buffers.meta.own]


@example(
    case=Problem(tokens=(5, 3, 0), num_experts=66, top_k=3), capacity=9, wrong=0, is_int32=True
)
@example(case=Problem(tokens=(7,), num_experts=3, top_k=9), capacity=None, wrong=3, is_int32=False)
@example(case=Problem(tokens=(40, 9), num_experts=2, top_k=1), capacity=9, wrong=0, is_int32=False)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    case=problem(),
    capacity=st.sampled_from([None, 3, 100]),
    wrong=st.sampled_from([0, 0, -2, 2**32]),
    is_int32=st.booleans(),
)
def test_the_plan_equals_the_reference_bitwise(case, capacity, wrong, is_int32):
    """The words of the plan, of counts and of rows; also with ids that are no expert's."""
    ids = [case.inputs(rank, DEVICE)[1] for rank in range(len(case.tokens))]
    if is_int32:
        ids = [one.int() for one in ids]
    is_wrong = bool(wrong) and ids[-1].numel() > 0
    if is_wrong:
        ids[-1][0, 0] = wrong if ids[-1].dtype == torch.int64 else case.num_experts
    options = {} if capacity is None else {"capacity": capacity, "admit": keep_fair}
    got, want = (plans(case, ids, impl, **options) for impl in ("triton", "reference"))
    assert [value.dtype for value in got] == [value.dtype for value in want]
    assert all(map(torch.equal, got, want))
    assert got[7] == (not is_wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_pairs_equal_the_reference_bitwise(dtype):
    case = Problem(tokens=(5, 0, 3), num_experts=6, top_k=3, width=64, dtype=dtype)
    inputs = [case.inputs(rank, DEVICE) for rank in range(3)]
    seen = []
    for impl in ("triton", "reference"):
        layer = case.virtual(impl=impl, codec=MXFP8, backward_codec=MXFP8, device=DEVICE)
        sent = layer.dispatch(*map(list, zip(*inputs, strict=True)))
        ends = [int(part.offsets_E[-1]) for part in sent]
        assert sum(ends) > 0
        rows = [part.rows_RD[:end] for part, end in zip(sent, ends, strict=True)]
        pairs = [part.encoded for part in sent]
        data = [
            value.view(torch.uint8)[:end]
            for pair, end in zip(pairs, ends, strict=True)
            for value in pair or ()
        ]
        assert len(data) == 6
        seen.append([*rows, *data])
    assert all(map(torch.equal, *seen))


class GuardedMemory(InProcessMemory):
    """Buffers with a guard before and after, and no byte of them defined at first."""

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        super().__init__(num_ranks, device)
        self.guards: list[torch.Tensor] = []

    def allocate(self, shape, dtype):
        size = torch.Size(shape).numel()
        whole = [torch.empty(size + 2 * GUARD, dtype=dtype, device=self.device) for _ in self.ranks]
        for value in whole:
            value.view(torch.uint8).fill_(0xFF)  # NaN, or -1
            self.guards += [value[:GUARD], value[-GUARD:]]
        every = [value[GUARD:-GUARD].view(shape) for value in whole]
        return Shared(every, every, pointer_table(every, self.device))

    def is_intact(self) -> bool:
        return all(bool((guard.view(torch.uint8) == 0xFF).all()) for guard in self.guards)


@pytest.mark.parametrize("combine_by", ["put", "get"])
def test_nothing_is_read_that_was_not_written_and_nothing_written_outside(monkeypatch, combine_by):
    case = Problem(tokens=(5, 2, 0, 4), num_experts=4, top_k=3, width=24, experts=(-1, 0, 2, 3))
    inputs = [case.inputs(rank, DEVICE) for rank in range(4)]
    options = {"capacity": 7, "admit": lambda requested, capacity: requested + 2, "device": DEVICE}
    want = run_virtual(case.virtual(impl="reference", combine_by="put", **options), inputs)
    monkeypatch.setattr("olmo_ep_comm._rowwise.virtual.InProcessMemory", GuardedMemory)
    layer = case.virtual(impl="triton", combine_by=combine_by, **options)
    assert any(value["dropped"] > 0 for value in want)
    for _ in range(2):
        for got, reference in zip(run_virtual(layer, inputs), want, strict=True):
            for name, value in reference.items():
                assert torch.equal(got[name], value), name
    memory = layer._buffers.memory
    assert isinstance(memory, GuardedMemory)
    assert memory.is_intact()
    memory.guards[0][3] = 0
    assert not memory.is_intact()


needs_cuda = pytest.mark.skipif(INTERPRETED, reason="needs a GPU")


def make_large(
    impl: Literal["reference", "triton"] = "triton", **options
) -> tuple[VirtualRowwise, list]:
    case = Problem(tokens=(1000, 700), num_experts=16, top_k=4, width=1024, dtype=torch.bfloat16)
    inputs = [case.inputs(rank, "cuda") for rank in range(2)]
    return case.virtual(impl=impl, device="cuda", **options), inputs


def step(layer: VirtualRowwise, inputs: list) -> list[torch.Tensor]:
    """One layer forward and backward without a wait of the host."""
    leaves = [(x.detach().requires_grad_(), w.detach().requires_grad_()) for x, _, w in inputs]
    sent = layer.dispatch([x for x, _ in leaves], [i[1] for i in inputs], [w for _, w in leaves])
    results = [part.rows_RD * part.row_weights_R[:, None].bfloat16() * 3 for part in sent]
    sums = layer.combine(results, sent[0].handle)
    gradients = torch.autograd.grad(loss_of(sums), [leaf for pair in leaves for leaf in pair])
    return [*(value.detach() for value in sums), *gradients]


@needs_cuda
@pytest.mark.parametrize(("num_experts", "top_k"), [(64, 8), (512, 22), (2, 1)])
def test_a_large_plan_equals_the_reference_bitwise(num_experts, top_k):
    tokens = (16384, 300, 0, 9999) if num_experts > 2 else (16384, 300)
    case = Problem(tokens=tokens, num_experts=num_experts, top_k=top_k)
    ids = [case.inputs(rank, DEVICE)[1] for rank in range(len(case.tokens))]
    for capacity in (None, 10_000):
        options = {} if capacity is None else {"capacity": capacity, "admit": keep_fair}
        got, want = (plans(case, ids, impl, **options) for impl in ("triton", "reference"))
        assert all(map(torch.equal, got, want))


@needs_cuda
@pytest.mark.parametrize("combine_by", ["put", "get"])
def test_the_host_never_waits_and_large_shapes_equal_the_reference(combine_by):
    layer, inputs = make_large(combine_by=combine_by)
    step(layer, inputs)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step(layer, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = step(make_large("reference")[0], inputs)
    assert all(map(torch.equal, got, want))


@needs_cuda
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_an_unknown_id_is_a_device_side_assertion(impl):
    """In a process of its own, since the assertion ends the use of the GPU."""
    code = (
        "import torch; from olmo_ep_comm import VirtualRowwise;"
        "layer = VirtualRowwise(num_ranks=2, num_experts=2, max_tokens=1, width=8, top_k=1,"
        f"device='cuda', impl='{impl}');"
        "x = torch.ones(1, 8, device='cuda').bfloat16(); w = torch.ones(1, 1, device='cuda');"
        "good, bad = (torch.tensor([[i]], device='cuda') for i in (1, 2));"
        "layer.dispatch([x, x], [good, bad], [w, w]); torch.cuda.synchronize()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=240
    )
    assert done.returncode != 0
    assert "`expert_ids_TK` must hold ids" in done.stderr


@needs_cuda
def test_a_captured_graph_replays_other_routes():
    layer, inputs = make_large()
    static = [tuple(value.clone() for value in one) for one in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(layer, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(layer, static)
    for shift in range(3):
        for one, (x_TD, ids, weights_TK) in zip(static, inputs, strict=True):
            one[0].copy_(x_TD * (1 + shift))
            one[1].copy_(torch.where(ids < 0, ids, (ids + shift) % 16))
            one[2].copy_(weights_TK)
        graph.replay()
        got = [value.clone() for value in outputs]
        want = step(layer, static)
        assert all(map(torch.equal, got, want)), shift


@needs_cuda
@pytest.mark.parametrize("combine_by", ["put", "get"])
def test_any_number_of_programs_gives_the_same_bits(monkeypatch, combine_by):
    from olmo_ep_comm._triton import moves

    layer, inputs = make_large(combine_by=combine_by)
    want = step(layer, inputs)
    for programs in (1, 16, 1000):
        for name in PROGRAMS:
            monkeypatch.setattr(moves, name, programs)
        assert all(map(torch.equal, step(layer, inputs), want)), programs


@needs_cuda
def test_rows_past_two_gigabytes_are_written():
    rows = 2**31 // 1024 + 4096
    layer = VirtualRowwise(
        num_ranks=1,
        num_experts=2,
        max_tokens=rows,
        width=1024,
        top_k=1,
        device="cuda",
        impl="triton",
    )
    x_TD = torch.ones(rows, 1024, dtype=torch.bfloat16, device="cuda")
    x_TD[-1] = 3
    ids = torch.ones(rows, 1, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        (sent,) = layer.dispatch([x_TD], [ids], [torch.ones(rows, 1, device="cuda")])
        assert (sent.rows_RD[-1] == 3).all()
        (y_TD,) = layer.combine([sent.rows_RD.clone()], sent.handle)
        assert torch.equal(y_TD, x_TD)


def test_the_kernels_are_what_runs():
    """`auto` on a GPU, and the name of what cannot run elsewhere."""
    layer = Problem(tokens=(2,), num_experts=2, top_k=1).virtual(impl="triton", device=DEVICE)
    assert layer._buffers.settings.moves.__name__ == "olmo_ep_comm._triton.moves"
    inputs = [Problem(tokens=(2,), num_experts=2, top_k=1, experts=(1,)).inputs(0, DEVICE)]
    sent = layer.dispatch(*map(list, zip(*inputs, strict=True)))
    results = [expert_results(sent[0], layer.local_experts(0))]
    (y_TD,) = layer.combine(results, sent[0].handle)
    torch.testing.assert_close(y_TD, (inputs[0][0] * 1.5 + 1.5) * inputs[0][2])
