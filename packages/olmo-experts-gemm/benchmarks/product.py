"""`grouped_mm` and its two gradients beside torch's own grouped product.

    forward  y  = x @ w[e].T        dgrad  dx = dy @ w[e]        wgrad  dw[e] = dy_e.T @ x_e

Ours runs through the public function and autograd, with what those add; torch's runs bare.

Shapes: R rows, D inner width, F outer width, E experts.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from cells import OURS, Cell, Settings, guarded
from olmo_experts_gemm import grouped_mm
from shapes import LOADS, WEIGHT_STD, ProductShape, draw_counts
from timing import ERROR_LIMIT, interleave, poison, relative_error
from torch import Tensor

PEER = "torch"
# torch 2.10 made the name public.
_torch_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


def measure(shapes: Iterable[ProductShape], settings: Settings) -> Iterator[Cell]:
    """Every shape under every load: three cells each."""
    for shape in shapes:
        for load in LOADS:
            counts_E = draw_counts(load, shape.R, shape.E, settings.generator)
            for what in ("forward", "dgrad", "wgrad"):
                blank = Cell(topic="product", shape=shape.name, case=load, what=what, unit="ms")
                yield from guarded(
                    f"product {shape.name} {load} {what}",
                    lambda b=blank, s=shape, c=counts_E: [_cell(b, s, c, settings)],
                    blank,
                )


def _cell(blank: Cell, shape: ProductShape, counts_E: Tensor, settings: Settings) -> Cell:
    R, D, F, E = shape.R, shape.D, shape.F, shape.E
    options = {"device": settings.device, "dtype": torch.bfloat16}
    counts_E = counts_E.to(settings.device)
    offsets_E = counts_E.cumsum(0).to(torch.int32)
    x_RD = torch.randn(R, D, **options)
    w_EFD = torch.randn(E, F, D, **options).mul_(WEIGHT_STD)
    dy_RF = torch.randn(R, F, **options)

    operands = (blank.what, x_RD, w_EFD, dy_RF, offsets_E)
    calls = {OURS: _ours(*operands, settings.impl), PEER: _torchs(*operands)}
    error = _error(calls, counts_E if blank.what == "wgrad" else None, settings)
    cell = dataclasses.replace(
        blank,
        flops=shape.flops,
        imbalance=float(counts_E.max()) * E / R,
        errors={PEER: error},
        failure="" if error < ERROR_LIMIT else f"ours and torch differ by {error:.1e}",
        samples=interleave(calls, settings) if error < ERROR_LIMIT else {},
    )
    print(f"{cell.topic} {cell.shape} {cell.case} {cell.what}: {_line(cell)}", flush=True)
    return cell


def _ours(
    what: str, x_RD: Tensor, w_EFD: Tensor, dy_RF: Tensor, offsets_E: Tensor, impl: Any
) -> Callable[[], Tensor]:
    if what == "forward":
        return lambda: grouped_mm(x_RD, w_EFD, offsets_E, impl=impl)
    # A graph in which nothing but the one gradient is asked for.
    leaf = (x_RD if what == "dgrad" else w_EFD).detach().requires_grad_()
    x_RD, w_EFD = (leaf, w_EFD) if what == "dgrad" else (x_RD, leaf)
    y_RF = grouped_mm(x_RD, w_EFD, offsets_E, impl=impl)
    return lambda: torch.autograd.grad(y_RF, leaf, dy_RF, retain_graph=True)[0]


def _torchs(
    what: str, x_RD: Tensor, w_EFD: Tensor, dy_RF: Tensor, offsets_E: Tensor
) -> Callable[[], Tensor]:
    if what == "forward":
        return lambda: _torch_grouped_mm(x_RD, w_EFD.mT, offs=offsets_E)
    if what == "dgrad":
        return lambda: _torch_grouped_mm(dy_RF, w_EFD, offs=offsets_E)
    return lambda: _torch_grouped_mm(dy_RF.t(), x_RD, offs=offsets_E)


def _error(
    calls: dict[str, Callable[[], Tensor]], counts_E: Tensor | None, settings: Settings
) -> float:
    theirs = calls[PEER]()
    poison(theirs.nbytes, settings)
    ours = calls[OURS]()
    if counts_E is not None and bool((counts_E == 0).any()):
        # Releases of torch differ in what an expert without rows gets; ours is zero.
        if bool((ours[counts_E == 0] != 0).any()):
            return float("inf")
        ours, theirs = ours[counts_E > 0], theirs[counts_E > 0]
    return relative_error(ours, theirs)


def _line(cell: Cell) -> str:
    ours, theirs, ratio = cell.tflops(OURS), cell.tflops(PEER), cell.ratio(PEER)
    if ours is None or theirs is None or ratio is None:
        return f"CHECK FAILED, {cell.failure}"
    return f"{ours:.1f} TFLOP/s, torch {theirs:.1f}, ratio {ratio:.3f}"
