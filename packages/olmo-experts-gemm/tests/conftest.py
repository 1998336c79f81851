"""Oracles in float64, row by row, that share no code with the package."""

import os
from collections.abc import Callable, Iterator
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

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


def _mlp(x_D: Tensor, w_gate_up_2HD: Tensor, w_down_DH: Tensor) -> Tensor:
    H = w_down_DH.shape[1]
    gate_H, up_H = w_gate_up_2HD[:H] @ x_D, w_gate_up_2HD[H:] @ x_D
    return w_down_DH @ (gate_H / (1 + torch.exp(-gate_H)) * up_H)


def _swiglu(
    x_RD: Tensor, w_gate_up: Tensor, w_down: Tensor, counts: list[int], weights_R: Tensor
) -> Tensor:
    rows = [
        weights_R[row] * _mlp(x_RD[row], w_gate_up[expert], w_down[expert])
        for row, expert in enumerate(_expert_of_row(counts))
    ]
    return _stack(rows, *x_RD.shape, (x_RD, w_gate_up, w_down, weights_R))


def _moe(x_TD: Tensor, ids: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    tokens = []
    for x_D, ids_K, weights_K in zip(x_TD, ids.tolist(), weights, strict=True):
        y_D = torch.zeros_like(x_D)
        for expert, weight in zip(ids_K, weights_K, strict=True):
            if expert >= 0:
                y_D = y_D + weight * _mlp(x_D, w_gate_up[expert], w_down[expert])
        tokens.append(y_D)
    return _stack(tokens, *x_TD.shape, (x_TD, weights, w_gate_up, w_down))


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
    got: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]
) -> None:
    """At most twice the error that plain torch makes in the same dtype."""
    for name, value in exact.items():
        error, allowed = (
            (result[name].double() - value).abs().max().item() for result in (got, plain)
        )
        epsilon = 1e-6 * value.abs().max().item()
        assert error <= 2 * allowed + epsilon, f"{name}: error {error}, plain torch {allowed}"


@pytest.fixture(scope="session")
def assert_twice_as_good() -> Callable[..., None]:
    return _assert_twice_as_good
