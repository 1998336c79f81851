"""The kernels of the one-sided exchange against its moves in plain torch, bit for bit.

On a GPU, or in Triton's interpreter (`test_interpreter.py`), which has no bfloat16 arithmetic worth
trusting: there sums are tested in float32.
"""

import os
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


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs programs one after another; odd numbers of them divide nothing."""
    from olmo_ep_comm._triton import moves

    if INTERPRETED:
        monkeypatch.setattr(moves, "LINK_PROGRAMS", 3)
        monkeypatch.setattr(moves, "LOCAL_PROGRAMS", 3)
        monkeypatch.setattr(moves, "_COLUMNS", 8)  # several blocks of columns a row


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


@example(case=Problem(tokens=(0, 0), num_experts=2, top_k=2), capacity=1)
@example(case=Problem(tokens=(5, 0, 3, 1), num_experts=8, top_k=4, experts=(7,)), capacity=40)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(case=problem(), capacity=st.sampled_from([3, 100]))
def test_every_result_equals_the_reference_bitwise(case, capacity):
    inputs = [case.inputs(rank, DEVICE) for rank in range(len(case.tokens))]
    options = {"capacity": capacity, "admit": keep_fair, "device": DEVICE}
    got = run_virtual(case.virtual(impl="triton", **options), inputs)
    want = run_virtual(case.virtual(impl="reference", **options), inputs)
    for mine, reference in zip(got, want, strict=True):
        for name, value in reference.items():
            assert torch.equal(mine[name], value), name


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


def test_nothing_is_read_that_was_not_written_and_nothing_written_outside(monkeypatch):
    case = Problem(tokens=(5, 2, 0, 4), num_experts=4, top_k=3, width=24, experts=(-1, 0, 2, 3))
    inputs = [case.inputs(rank, DEVICE) for rank in range(4)]
    options = {"capacity": 7, "admit": lambda requested, capacity: requested + 2, "device": DEVICE}
    want = run_virtual(case.virtual(impl="reference", **options), inputs)
    monkeypatch.setattr("olmo_ep_comm._rowwise.virtual.InProcessMemory", GuardedMemory)
    layer = case.virtual(impl="triton", **options)
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


def make_large(impl: Literal["reference", "triton"] = "triton") -> tuple[VirtualRowwise, list]:
    case = Problem(tokens=(1000, 700), num_experts=16, top_k=4, width=1024, dtype=torch.bfloat16)
    inputs = [case.inputs(rank, "cuda") for rank in range(2)]
    return case.virtual(impl=impl, device="cuda"), inputs


def step(layer: VirtualRowwise, inputs: list) -> list[torch.Tensor]:
    """One layer forward and backward without a wait of the host."""
    leaves = [(x.detach().requires_grad_(), w.detach().requires_grad_()) for x, _, w in inputs]
    sent = layer.dispatch([x for x, _ in leaves], [i[1] for i in inputs], [w for _, w in leaves])
    results = [part.rows_RD * part.row_weights_R[:, None].bfloat16() * 3 for part in sent]
    sums = layer.combine(results, sent[0].handle)
    gradients = torch.autograd.grad(loss_of(sums), [leaf for pair in leaves for leaf in pair])
    return [*(value.detach() for value in sums), *gradients]


@needs_cuda
def test_the_host_never_waits_and_large_shapes_equal_the_reference():
    layer, inputs = make_large()
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
def test_any_number_of_programs_gives_the_same_bits(monkeypatch):
    from olmo_ep_comm._triton import moves

    layer, inputs = make_large()
    want = step(layer, inputs)
    for programs in (1, 16, 1000):
        monkeypatch.setattr(moves, "LINK_PROGRAMS", programs)
        monkeypatch.setattr(moves, "LOCAL_PROGRAMS", programs)
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
