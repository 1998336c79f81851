"""Oracles in float64, row by row, that share no code with the package."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

# importlib mode puts no folder on the path, and some tests share a module of this one.
sys.path.append(str(Path(__file__).parent))
torch.set_num_threads(1)
# Without it torch refuses cuBLAS under deterministic algorithms.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True, scope="module")
def _poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, and an operation that adds with atomics raises."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all(), "this torch does not poison fresh memory"
    yield
    torch.use_deterministic_algorithms(False)


def _ends(counts: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=device)


def _expert_of_row(counts: list[int]) -> list[int]:
    return [expert for expert, count in enumerate(counts) for _ in range(count)]


def _stack(rows: list[Tensor], num_rows: int, width: int, leaves: tuple[Tensor, ...]) -> Tensor:
    """The rows, then zeros, of a graph that reaches every leaf even when there are no rows."""
    nothing = 0.0 * sum(leaf.sum() for leaf in leaves)
    tail = [leaves[0].new_zeros(width)] * (num_rows - len(rows))
    y = torch.stack(rows + tail) if num_rows else leaves[0].new_zeros(0, width)
    return y + nothing


def _grouped_mm(x_RD: Tensor, w_EFD: Tensor, counts: list[int]) -> Tensor:
    rows = [w_EFD[expert] @ x_RD[row] for row, expert in enumerate(_expert_of_row(counts))]
    return _stack(rows, len(x_RD), w_EFD.shape[1], (x_RD, w_EFD))


def _activate(hidden: Tensor, activation: str) -> Tensor:
    if activation == "relu_squared":
        return torch.where(hidden > 0, hidden * hidden, 0.0)
    gate, up = hidden[: len(hidden) // 2], hidden[len(hidden) // 2 :]
    if activation == "geglu":
        return gate * (1 + torch.erf(gate / 2**0.5)) / 2 * up
    if activation == "clamped_swiglu":
        gate = torch.where(gate > 7, 7.0, gate)
        up = torch.where(up > 7, 7.0, torch.where(up < -7, -7.0, up)) + 1
        return gate / (1 + torch.exp(-1.702 * gate)) * up
    return gate / (1 + torch.exp(-gate)) * up


def _mlp(
    x_D: Tensor, expert: int, activation: str, w_gate_up: Tensor, w_down: Tensor, *biases: Tensor
) -> Tensor:
    b_gate_up, b_down = (bias[expert] for bias in biases) if biases else (0.0, 0.0)
    hidden = w_gate_up[expert] @ x_D + b_gate_up
    return w_down[expert] @ _activate(hidden, activation) + b_down


def _swiglu(
    x_RD: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    counts: list[int],
    weights_R: Tensor,
    *biases: Tensor,
    activation: str = "swiglu",
) -> Tensor:
    stacks = (w_gate_up, w_down, *biases)
    rows = [
        weights_R[row] * _mlp(x_RD[row], expert, activation, *stacks)
        for row, expert in enumerate(_expert_of_row(counts))
    ]
    return _stack(rows, *x_RD.shape, (x_RD, weights_R, *stacks))


def _moe(
    x_TD: Tensor, ids: Tensor, weights: Tensor, *stacks: Tensor, activation: str = "swiglu"
) -> Tensor:
    tokens = []
    for x_D, ids_K, weights_K in zip(x_TD, ids.tolist(), weights, strict=True):
        y_D = torch.zeros_like(x_D)
        for expert, weight in zip(ids_K, weights_K, strict=True):
            if expert >= 0:
                y_D = y_D + weight * _mlp(x_D, expert, activation, *stacks)
        tokens.append(y_D)
    return _stack(tokens, *x_TD.shape, (x_TD, weights, *stacks))


@pytest.fixture(scope="session")
def oracle() -> SimpleNamespace:
    return SimpleNamespace(ends=_ends, grouped_mm=_grouped_mm, swiglu=_swiglu, moe=_moe)


def _run(
    function: Callable[..., Tensor], tensors: dict[str, Tensor], dy: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The output of `function(*tensors)` and every gradient, computed in `dtype`."""
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in tensors.items()}
    y = function(*leaves.values())
    y.backward(dy.to(y.dtype))
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    assert None not in gradients.values(), f"a gradient is missing: {gradients.keys()}"
    return {"y": y.detach(), **gradients}


@pytest.fixture(scope="session")
def run() -> Callable[..., dict[str, Tensor]]:
    return _run


def _assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Each tensor apart: its largest error beside its largest value, and the ratio of the two."""
    for name, value in want.items():
        assert got[name].shape == value.shape, name
        actual, value = got[name].double(), value.double()
        scale = value.abs().max().item() if value.numel() else 0.0
        error = (actual - value).abs().max().item() if value.numel() else 0.0
        ratio = ((actual * value).sum() / (value * value).sum()).item() if scale else 1.0
        assert error <= tolerance * scale, f"{name}: error {error}, scale {scale}, ratio {ratio}"


@pytest.fixture(scope="session")
def assert_same() -> Callable[..., None]:
    return _assert_same


def _assert_twice_as_good(
    got: dict[str, Tensor],
    plain: dict[str, Tensor],
    exact: dict[str, Tensor],
    largest: float = 2.0,
) -> None:
    """At most twice the error that plain torch makes in the same dtype.

    By the root of the mean square, and by the largest error, for which `largest` may be more than 2
    where errors are so unequal that one row alone makes the largest.
    """
    for name, value in exact.items():
        ours, theirs = ((result[name].double() - value).abs() for result in (got, plain))
        epsilon = 1e-6 * value.abs().max().item()
        for what, error, allowed in (
            ("root mean square", ours.square().mean().sqrt(), 2 * theirs.square().mean().sqrt()),
            ("largest", ours.max(), largest * theirs.max()),
        ):
            message = f"{name}: {what} error {error.item()}, allowed {allowed.item()}"
            assert error <= allowed + epsilon, message


@pytest.fixture(scope="session")
def assert_twice_as_good() -> Callable[..., None]:
    return _assert_twice_as_good


@pytest.fixture(scope="session")
def device() -> str:
    """Where Triton's kernels run: the GPU, or the CPU in a process of Triton's interpreter."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@contextmanager
def _no_host_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="session")
def no_host_sync() -> Callable[[], AbstractContextManager[None]]:
    return _no_host_sync
