"""Every kernel as it is launched on CUDA, compiled here for GPUs that need not be here.

The launchers run on CPU tensors with the tilings for CUDA tensors, and each launch only compiles.
What comes out must use the tensor cores of its architecture and spill no register.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import compiled_kernels
import pytest
import torch
from compiled_kernels import SHARED_BYTES
from torch import Tensor

TENSOR_CORES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
E, T, K = 4, 64, 8


@contextmanager
def compiling_for(capability: int) -> Iterator[list[Any]]:
    """As the shared one, with the tilings that CUDA tensors on this architecture get."""
    from olmo_experts_gemm._triton import tiling

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "generation", lambda device: capability // 10)
        for name in ("row_product", "up_product", "weight_gradient"):
            patch.setattr(tiling, name, _as_if_on_cuda(getattr(tiling, name)))
        with compiled_kernels.compiling_for(capability) as compiled:
            yield compiled


def assert_fits(kernel: Any) -> None:
    """By what sm_90 and sm_100 have."""
    compiled_kernels.assert_fits(kernel, SHARED_BYTES[90])


def _as_if_on_cuda(choose: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(x: Tensor, *args: Any, **options: Any) -> Any:
        cuda = SimpleNamespace(type="cuda")
        return choose(SimpleNamespace(dtype=x.dtype, shape=x.shape, device=cuda), *args, **options)

    return chosen


def _packed(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def _indices(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32)


def _row_product(D: int, H: int, *, transposed: bool, gather: bool = False) -> None:
    from olmo_experts_gemm._triton.row_product import row_product

    row_product(
        _packed(T if gather else T * K, H),
        _packed(E, H, D) if transposed else _packed(E, D, H),
        _indices(E),
        transposed=transposed,
        route_R=_indices(T * K) if gather else None,
        top_k=K,
    )


def _up_product(
    D: int,
    H: int,
    *,
    activation: str = "swiglu",
    gather: bool = True,
    plain: bool = False,
    save: bool = True,
) -> None:
    from olmo_experts_gemm._triton.up_product import up_product

    F = H if activation == "relu_squared" else 2 * H
    up_product(
        _packed(T if gather else T * K, D),
        _packed(E, F, D),
        None if plain else _packed(E, F),
        _indices(E),
        route_R=_indices(T * K) if gather else None,
        weights=None if plain else torch.empty(T * K),
        top_k=K,
        activation=activation,
        save_hidden=save,
    )


def _down_gradient(
    D: int, H: int, *, activation: str = "swiglu", gather: bool = True, plain: bool = False
) -> None:
    from olmo_experts_gemm._triton.down_gradient import down_gradient

    down_gradient(
        _packed(T if gather else T * K, D),
        _packed(E, D, H),
        _packed(T * K, H if activation == "relu_squared" else 2 * H),
        _indices(E),
        route_R=_indices(T * K) if gather else None,
        weights=None if plain else torch.empty(T * K),
        top_k=K,
        activation=activation,
    )


def _weight_gradient(D: int, H: int, *, gather: str, add: bool = False) -> None:
    from olmo_experts_gemm._triton.weight_gradient import weight_gradient

    weight_gradient(
        _packed(T if gather == "left" else T * K, D),
        _packed(T if gather == "right" else T * K, H),
        _indices(E),
        route_R=None if gather == "none" else _indices(T * K),
        gather=gather,
        top_k=K,
        into=torch.empty(E, D, H) if add else None,
    )


def _rows(D: int) -> None:
    from olmo_experts_gemm._triton.collect import collect, collect_weight_gradient
    from olmo_experts_gemm._triton.copy_rows import copy_rows
    from olmo_experts_gemm._triton.expert_sums import add_to_rows, dot_rows, sum_rows

    rows, row_TK, route_R = _packed(T * K, D), _indices(T * K).view(T, K), _indices(T * K)
    tokens, vectors, weights = _packed(T, D), _packed(E, D), torch.empty(T * K)
    collect(rows, row_TK)
    collect_weight_gradient(torch.empty(2, T * K), row_TK)
    sum_rows(tokens, _indices(E), route_R=route_R, weights=weights, top_k=K)
    add_to_rows(rows, vectors, _indices(E), route_R=route_R, weights=weights)
    dot_rows(tokens, vectors, _indices(E), T * K, route_R=route_R, top_k=K)
    copy_rows(tokens, weights, row_TK, T * K)


def _sort(num_experts: int) -> None:
    from olmo_experts_gemm._triton.sort_routes import sort_routes

    sort_routes(torch.zeros(T, K, dtype=torch.long), num_experts)


LAUNCHES: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "row_product": (_row_product, {"transposed": False}),
    "row_product transposed": (_row_product, {"transposed": True}),
    "row_product of tokens": (_row_product, {"transposed": True, "gather": True}),
    "up_product": (_up_product, {}),
    "up_product plain": (_up_product, {"plain": True}),
    "up_product of rows": (_up_product, {"gather": False, "save": False}),
    "up_product of saved rows": (_up_product, {"gather": False}),
    "up_product of plain rows": (_up_product, {"gather": False, "plain": True}),
    "up_product clamped_swiglu of rows": (
        _up_product,
        {"activation": "clamped_swiglu", "gather": False},
    ),
    "up_product relu_squared of rows": (
        _up_product,
        {"activation": "relu_squared", "gather": False},
    ),
    "up_product geglu of rows": (_up_product, {"activation": "geglu", "gather": False}),
    "up_product geglu": (_up_product, {"activation": "geglu"}),
    "up_product relu_squared": (_up_product, {"activation": "relu_squared"}),
    "up_product clamped_swiglu": (_up_product, {"activation": "clamped_swiglu"}),
    "down_gradient": (_down_gradient, {}),
    "down_gradient plain": (_down_gradient, {"plain": True}),
    "down_gradient of rows": (_down_gradient, {"gather": False}),
    "down_gradient geglu": (_down_gradient, {"activation": "geglu"}),
    "down_gradient relu_squared": (_down_gradient, {"activation": "relu_squared"}),
    "down_gradient clamped_swiglu": (_down_gradient, {"activation": "clamped_swiglu"}),
    "weight_gradient": (_weight_gradient, {"gather": "none"}),
    "weight_gradient added": (_weight_gradient, {"gather": "none", "add": True}),
    "weight_gradient left": (_weight_gradient, {"gather": "left"}),
    "weight_gradient right": (_weight_gradient, {"gather": "right"}),
    "weight_gradient right added": (_weight_gradient, {"gather": "right", "add": True}),
}


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_kernel_uses_the_tensor_cores_and_spills_nothing(launch: str, capability: int) -> None:
    kernels = _compile(launch, capability)
    assert any(TENSOR_CORES[capability] in kernel.asm["ptx"] for kernel in kernels)
    for kernel in kernels:
        assert_fits(kernel)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("launch", ["row_product", "up_product", "down_gradient"])
def test_widths_that_no_tile_divides_spill_nothing(launch: str, capability: int) -> None:
    for kernel in _compile(launch, capability, D=520, H=264):
        assert_fits(kernel)


@pytest.mark.parametrize("capability", [90, 100])
def test_the_kernels_of_rows_spill_nothing(capability: int) -> None:
    with compiling_for(capability) as compiled:
        _rows(2048)
    assert len(compiled) == 8, "six kernels, two of them on a list of tiles"
    for kernel in compiled:
        assert_fits(kernel)


@pytest.mark.parametrize("num_experts", [8, 128, 512])
def test_the_sort_spills_nothing(num_experts: int) -> None:
    with compiling_for(90) as compiled:
        _sort(num_experts)
    count, place = compiled
    assert "assertfail" in count.asm["ptx"], "an id past the last expert must be an error"
    assert_fits(place)


@pytest.mark.parametrize(
    "launch", ["row_product", "up_product", "down_gradient", "weight_gradient right added"]
)
def test_a_kernel_compiles_for_ampere(launch: str) -> None:
    kernels = _compile(launch, 80)
    assert any(TENSOR_CORES[80] in kernel.asm["ptx"] for kernel in kernels)
    # sm_86 and sm_89 have 99 KiB a program.
    assert max(kernel.metadata.shared for kernel in kernels) <= 99 * 1024


def _compile(launch: str, capability: int, D: int = 512, H: int = 256) -> list[Any]:
    launcher, form = LAUNCHES[launch]
    with compiling_for(capability) as compiled:
        launcher(D, H, **form)
    return compiled
