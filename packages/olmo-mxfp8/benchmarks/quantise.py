"""Quantise and dequantise: bytes moved a second beside a copy, and beside the peers' kernels."""

from collections.abc import Callable, Iterator
from functools import partial

import peers
import torch
from cells import Cell, Contender, Settings, contend
from olmo_mxfp8 import (
    MXRecipe,
    MXTensor,
    WeightCache,
    dequantize,
    dequantize_rows,
    quantize,
    quantize_both,
    swiglu_quantize,
    swiglu_quantize_backward,
)
from timing import in_turn, relative_error
from torch import Tensor

SHAPES = ((65536, 4096), (131072, 1536))
TINY = ((256, 256),)
WEIGHTS = ((16, 3072, 4096), (128, 3072, 4096))
TINY_WEIGHTS = ((2, 128, 256),)
Make = Callable[[], Contender]


def measure(settings: Settings) -> Iterator[Cell]:
    """Every operation at every shape."""
    for R, C in TINY if settings.is_dry else SHAPES:
        options = {"device": settings.device, "dtype": torch.bfloat16}
        x = torch.randn(R, C, **options)
        hidden, d_act = torch.randn(R, 2 * C, **options), torch.randn(R, C, **options)
        for what, makers in (
            ("rows", _rows(x, settings)),
            ("columns", _columns(x, settings)),
            ("both", _both(x, settings)),
            ("rows by 128", {"ours": _of_one(x, settings, granularity=128)}),
            ("tiles 128x128", {"ours": _of_one(x, settings, granularity="128x128")}),
            ("dequantise", _dequantise(x, settings)),
            ("gathered dequantise", _gather(x, settings)),
            ("SwiGLU", _swiglu(hidden, settings)),
            ("SwiGLU backward", _swiglu_backward(d_act, hidden, settings)),
        ):
            blank = Cell(topic="quantise", shape=f"{R}x{C}", load="", what=what)
            yield from contend(
                blank, {**makers, "copy": partial(_copy, x)}, partial(in_turn, settings=settings)
            )
    for shape in TINY_WEIGHTS if settings.is_dry else WEIGHTS:
        yield from _weights(torch.randn(shape, device=settings.device), settings)


def _weights(w: Tensor, settings: Settings) -> Iterator[Cell]:
    """Renew the cache of a float32 main weight of experts."""
    for what, recipe in (
        ("weight cache", MXRecipe()),
        ("weight cache by 128x128", MXRecipe(granularity=128)),
    ):
        shape = "x".join(map(str, w.shape))
        blank = Cell(topic="quantise", shape=shape, load="", what=what)
        makers = {**_refresh(w, recipe, settings), "copy": partial(_copy, w)}
        yield from contend(blank, makers, partial(in_turn, settings=settings))


def mx_bytes(num_values: int) -> float:
    """Of codes and scales."""
    return num_values * 33 / 32


def _copy(x: Tensor) -> Contender:
    target = torch.empty_like(x)
    return Contender(call=lambda: target.copy_(x), work=2 * x.nbytes)


def _of_one(x: Tensor, settings: Settings, **options) -> Make:
    want = x.float()
    return lambda: Contender(
        call=lambda: quantize(x, impl=settings.impl, **options),
        work=x.nbytes + mx_bytes(x.numel()),
        error=lambda t: relative_error(dequantize(t), want),
        limit=0.03,
    )


def _theirs(x: Tensor, call: Callable[[], tuple[Tensor, Tensor]], dim: int) -> Contender:
    """A peer's quantisation, which must give our codes and scale bytes."""
    ours = quantize(x, dim=dim)

    def mismatches(result: tuple[Tensor, Tensor]) -> float:
        codes, scales = (t.view(torch.uint8) for t in result)
        if dim == 0:  # torchao gives the scales of columns as (C, R / 32)
            scales = scales.t() if scales.shape != ours.scales.shape else scales
        wrong = (codes != ours.data.view(torch.uint8)).float().mean()
        return float(wrong + (scales != ours.scales).float().mean())

    work = x.nbytes + mx_bytes(x.numel())
    return Contender(call=call, work=work, error=mismatches, limit=1e-6)


def _rows(x: Tensor, settings: Settings) -> dict[str, Make]:
    return {
        "ours": _of_one(x, settings),
        "olmo-core": lambda: _theirs(
            x, partial(peers.olmo_core().quantize_rows_to_mxfp8, x, scale_mode="rceil"), 1
        ),
        "torchao": lambda: _theirs(x, partial(peers.torchao().triton_to_mxfp8_dim0, x), 1),
    }


def _columns(x: Tensor, settings: Settings) -> dict[str, Make]:
    return {
        "ours": _of_one(x, settings, dim=0),
        "torchao": lambda: _theirs(x, partial(peers.torchao().triton_to_mxfp8_dim1, x), 0),
    }


def _both(x: Tensor, settings: Settings) -> dict[str, Make]:
    want = x.float()

    def error(pair: tuple[MXTensor, MXTensor]) -> float:
        return max(relative_error(dequantize(t), want) for t in pair)

    impl = settings.impl
    # Two passes do the same work; that they read twice is their loss.
    form = {"work": x.nbytes + 2 * mx_bytes(x.numel()), "error": error, "limit": 0.03}
    return {
        "ours": lambda: Contender(call=lambda: quantize_both(x, impl=impl), **form),
        "two passes": lambda: Contender(
            call=lambda: (quantize(x, dim=1, impl=impl), quantize(x, dim=0, impl=impl)), **form
        ),
    }


def _refresh(w: Tensor, recipe: MXRecipe, settings: Settings) -> dict[str, Make]:
    def error(pair: tuple[MXTensor, MXTensor]) -> float:
        straight, turned = (dequantize(t) for t in pair)
        return max(relative_error(straight, w), relative_error(turned.mT, w))

    form = {"work": w.nbytes + 2 * mx_bytes(w.numel()), "error": error, "limit": 0.03}

    def ours() -> Contender:
        cache = WeightCache(w, recipe=recipe)

        def call() -> tuple[MXTensor, MXTensor]:
            cache.refresh()
            return cache.forward, cache.input_grad

        return Contender(call=call, **form)

    def apart() -> Contender:
        once = partial(quantize, granularity=recipe.weight_granularity, impl=settings.impl)
        return Contender(call=lambda: (once(w), once(w.mT)), **form)

    return {"ours": ours, "two quantisations": apart}


def _dequantise(x: Tensor, settings: Settings) -> dict[str, Make]:
    t = quantize(x)
    want = dequantize(t)
    work = mx_bytes(x.numel()) + x.nbytes

    def olmo_core() -> Contender:
        scales = t.scales.view(torch.float8_e8m0fnu)
        call = partial(peers.olmo_core().dequantize_rows_from_mxfp8, t.data, scales)
        return Contender(call=call, work=work, error=lambda y: relative_error(y, want), limit=1e-6)

    return {
        "ours": lambda: Contender(
            call=lambda: dequantize(t, torch.bfloat16, impl=settings.impl),
            work=work,
            error=lambda y: relative_error(y, want),
            limit=1e-6,
        ),
        "olmo-core": olmo_core,
    }


def _gather(x: Tensor, settings: Settings) -> dict[str, Make]:
    t = quantize(x)
    rows = torch.randperm(x.shape[0], generator=settings.generator).to(x.device, torch.int32)
    want = dequantize(t)[rows]
    return {
        "ours": lambda: Contender(
            call=lambda: dequantize_rows(t, rows, impl=settings.impl),
            work=mx_bytes(x.numel()) + x.nbytes,
            error=lambda y: relative_error(y, want),
            limit=1e-6,
        ),
        "gather in bf16": lambda: Contender(
            call=lambda: x.index_select(0, rows), work=2 * x.nbytes
        ),
    }


def _swiglu(hidden: Tensor, settings: Settings) -> dict[str, Make]:
    gate, up = hidden.float().chunk(2, dim=-1)
    want = torch.nn.functional.silu(gate) * up
    num_values = want.numel()

    def olmo_core() -> Contender:
        """It takes up before gate, and also writes the activation in bfloat16."""
        swapped = torch.cat(hidden.chunk(2, dim=-1)[::-1], dim=-1)
        function = peers.olmo_core().swiglu_quantize_rows_to_mxfp8

        def error(result: tuple[Tensor, Tensor, Tensor]) -> float:
            return relative_error(result[0], want)

        work = hidden.nbytes + mx_bytes(num_values) + 2 * num_values
        return Contender(
            call=partial(function, swapped, scale_mode="rceil"), work=work, error=error, limit=0.01
        )

    return {
        "ours": lambda: Contender(
            call=lambda: swiglu_quantize(hidden, impl=settings.impl),
            work=hidden.nbytes + mx_bytes(num_values),
            error=lambda t: relative_error(dequantize(t), want),
            limit=0.03,
        ),
        "olmo-core": olmo_core,
    }


def _swiglu_backward(d_act: Tensor, hidden: Tensor, settings: Settings) -> dict[str, Make]:
    leaf = hidden.float().requires_grad_()
    gate, up = leaf.chunk(2, dim=-1)
    (want,) = torch.autograd.grad(torch.nn.functional.silu(gate) * up, leaf, d_act.float())
    return {
        "ours": lambda: Contender(
            call=lambda: swiglu_quantize_backward(d_act, hidden, impl=settings.impl)[0],
            work=d_act.nbytes + hidden.nbytes + mx_bytes(hidden.numel()),
            error=lambda t: relative_error(dequantize(t), want),
            limit=0.03,
        )
    }
