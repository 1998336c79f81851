"""Grouped products on MXFP8 operands beside those on BF16 ones, and from which width they win.

Shapes: R rows, K inner width, N outer width, E experts.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import peers
import torch
from cells import Cell, Contender, Settings, contend
from loads import LOADS, draw_offsets
from olmo_mxfp8 import dequantize, quantize, scaled_grouped_mm
from olmo_mxfp8._groups import Groups
from olmo_mxfp8._products import multiply_rows
from timing import in_turn, relative_error
from torch import Tensor

SHAPES = ((65536, 4096, 4096, 16), (131072, 4096, 1536, 128))
TINY = ((256, 128, 256, 4),)
WIDTHS = (512, 1024, 1536, 2048, 3072, 4096)
WIDTH_ROWS, WIDTH_EXPERTS = 65536, 16
TINY_WIDTHS = (128, 256)


def measure(settings: Settings) -> Iterator[Cell]:
    """Every shape under every load."""
    for R, K, N, E in TINY if settings.is_dry else SHAPES:
        for load in LOADS:
            blank = Cell(topic="product", shape=f"{R}x{K}x{N}x{E}", load=load, what="forward")
            yield from _cell(blank, R, K, N, E, settings)


def measure_widths(settings: Settings) -> Iterator[Cell]:
    """Square weights of growing width, under the uniform load."""
    R = 256 if settings.is_dry else WIDTH_ROWS
    E = 4 if settings.is_dry else WIDTH_EXPERTS
    for width in TINY_WIDTHS if settings.is_dry else WIDTHS:
        shape = f"{R}x{width}x{width}x{E}"
        blank = Cell(topic="width", shape=shape, load=LOADS[0], what="forward")
        yield from _cell(blank, R, width, width, E, settings)


def _cell(blank: Cell, R: int, K: int, N: int, E: int, settings: Settings) -> Iterator[Cell]:
    offsets_E = draw_offsets(blank.load, R, E, settings.generator).to(settings.device)
    options = {"device": settings.device, "dtype": torch.bfloat16}
    x_RK = torch.randn(R, K, **options)
    w_ENK = torch.randn(E, N, K, **options).mul_(K**-0.5)
    makers = _makers(x_RK, w_ENK, offsets_E, settings.is_dry)
    yield from contend(blank, makers, partial(in_turn, settings=settings))


def _makers(
    x: Tensor, w: Tensor, offsets: Tensor, is_dry: bool
) -> dict[str, Callable[[], Contender]]:
    grouped_mm = peers.torch_grouped_mm()
    flops = 2.0 * x.shape[0] * w.shape[1] * w.shape[2]
    want = grouped_mm(x, w.mT, offs=offsets)
    implementations: dict[str, Any] = {
        name: "reference" if is_dry else name for name in ("dequantise", "coarse")
    }

    def error(y: Tensor) -> float:
        return relative_error(y, want)

    def prepared(name: str, granularities: tuple[Any, Any]) -> Contender:
        """The operands are quantised before: what is timed multiplies."""
        a = quantize(x, granularity=granularities[0])
        b = quantize(w, granularity=granularities[1])
        impl = implementations[name]
        call = partial(scaled_grouped_mm, a, b, offsets, impl=impl)
        return Contender(call=call, work=flops, error=error, limit=0.045)

    def with_quantise() -> Contender:
        b = quantize(w, granularity="128x128")
        impl = implementations["coarse"]

        def call() -> Tensor:
            return scaled_grouped_mm(quantize(x, granularity=128), b, offsets, impl=impl)

        return Contender(call=call, work=flops, error=error, limit=0.045)

    def weights_cached() -> Contender:
        """As layers with `cached=True` multiply: of the weights the values are there."""
        a, impl = quantize(x), implementations["dequantise"]
        b = quantize(w) if is_dry else dequantize(quantize(w), torch.bfloat16)
        ends = offsets.tolist() if is_dry else None
        call = partial(multiply_rows, a, b, Groups(ends, offsets), impl, torch.bfloat16)
        return Contender(call=call, work=flops, error=error, limit=0.045)

    def ours_in_bf16() -> Contender:
        impl = "reference" if is_dry else "triton"
        call = partial(peers.experts_gemm().grouped_mm, x, w, offsets, impl=impl)
        return Contender(call=call, work=flops, error=error, limit=0.01)

    return {
        "bf16, torch": lambda: Contender(
            call=lambda: grouped_mm(x, w.mT, offs=offsets), work=flops
        ),
        "bf16, olmo-experts-gemm": ours_in_bf16,
        "dequantise": partial(prepared, "dequantise", (32, 32)),
        "dequantise, weights cached": weights_cached,
        "coarse": partial(prepared, "coarse", (128, "128x128")),
        "coarse + quantise": with_quantise,
    }
