"""`torch.compile` around dispatch and combine: bitwise the eager result and gradients."""

from collections.abc import Callable

import pytest
import torch
from olmo_ep_comm import AllToAllDispatcher, Dispatcher, LocalDispatcher
from torch import Tensor

NUM_EXPERTS, WIDTH = 4, 3
BACKENDS = ["eager", "aot_eager"]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
IDS = [[0, 3], [2, -1], [-1, -1], [1, 1], [3, 0]]
# The compiler instantiates the class that it traces, and warns of itself.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Function.* should not be instantiated:DeprecationWarning"
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_layer(dispatcher: Dispatcher, part: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a function of tokens, ids and weights that needs one call, the other, or both."""

    def layer(x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x_TD * 2, expert_ids_TK, weights_TK * 3)
        if part == "dispatch":
            used_R = torch.arange(sent.rows_RD.shape[0]) < sent.offsets_E[-1]
            y_RD = sent.rows_RD.sin() * sent.row_weights_R[:, None].to(x_TD.dtype)
            return torch.where(used_R[:, None], y_RD, 0).sum(0)
        y_RD = sent.rows_RD
        if part == "both":
            y_RD = y_RD.sin() * sent.row_weights_R[:, None].to(x_TD.dtype)
        return dispatcher.combine(y_RD, sent.handle)

    return layer


def run(layer: Callable, ids: list, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Return the result and the gradients of tokens and weights."""
    expert_ids_TK = torch.tensor(ids, dtype=torch.int64).view(len(ids), 2)
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(len(ids), WIDTH, generator=generator).to(dtype).requires_grad_()
    weights_TK = torch.rand(expert_ids_TK.shape, generator=generator).requires_grad_()
    y = layer(x_TD, expert_ids_TK, weights_TK)
    y.backward(torch.randn(y.shape, generator=generator).to(dtype))
    grads = [torch.zeros_like(v) if v.grad is None else v.grad for v in (x_TD, weights_TK)]
    return [y.detach(), *grads]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", ["dispatch", "combine", "both"])
def test_local_is_one_graph_and_equals_eager(part, dtype, backend):
    layer = make_layer(LocalDispatcher(num_experts=NUM_EXPERTS), part)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    got, want = run(compiled, IDS, dtype), run(layer, IDS, dtype)
    if part == "dispatch":  # a sum over R rows, and R differs: see `LocalDispatcher`
        torch.testing.assert_close(got, want)
    else:
        assert all(map(torch.equal, got, want)), (got, want)
    assert got[1].abs().sum() > 0
    assert part == "combine" or got[2].abs().sum() > 0


def test_local_with_other_numbers_of_tokens_equals_eager():
    layer = make_layer(LocalDispatcher(num_experts=NUM_EXPERTS), "both")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for ids in (IDS, IDS[:3], [], IDS[:1], IDS * 2):
        got, want = run(compiled, ids, torch.float32), run(layer, ids, torch.float32)
        assert all(map(torch.equal, got, want)), (ids, got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_graph_does_not_let_an_unknown_id_pass(backend):
    layer = make_layer(LocalDispatcher(num_experts=NUM_EXPERTS), "both")
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for unknown in (-2, NUM_EXPERTS):
        with pytest.raises(RuntimeError, match=r"must hold ids in .* got an id outside"):
            run(compiled, [[0, 1], [unknown, 2]], torch.float32)


def _compare_with_eager(rank: int, world: int) -> None:
    layer = make_layer(AllToAllDispatcher(num_experts=NUM_EXPERTS), "both")
    for backend, dtypes in (("eager", DTYPES[:1]), ("aot_eager", DTYPES)):
        for dtype in dtypes:
            torch._dynamo.reset()
            ids = IDS[rank : rank + 2]
            compiled = torch.compile(layer, backend=backend)
            got, want = run(compiled, ids, dtype, rank), run(layer, ids, dtype, rank)
            assert all(map(torch.equal, got, want)), (backend, dtype, got, want)
            assert all(value.abs().sum() > 0 for value in got)


@pytest.mark.dist
def test_all_to_all_equals_eager(processes):
    processes.run(_compare_with_eager, world=2)


def _graph_break(rank: int, world: int) -> str:
    layer = make_layer(AllToAllDispatcher(num_experts=NUM_EXPERTS), "both")
    run(layer, IDS, torch.float32)
    try:
        run(torch.compile(layer, backend="eager", fullgraph=True), IDS, torch.float32)
    except Exception as error:
        return str(error)
    return "none"


@pytest.mark.dist
def test_all_to_all_says_why_it_breaks_the_graph(processes):
    (message,) = processes.run(_graph_break, world=1)
    assert "every rank must do every exchange" in message
