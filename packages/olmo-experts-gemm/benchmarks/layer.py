"""Times of a whole layer: router, experts and combine, forward and with the backward pass."""

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator

import torch
from cells import OURS, Cell, Settings, guarded
from contenders import SONIC, Layer, Make, Operands, draw, our_route
from shapes import ROUTINGS, LayerShape
from timing import ERROR_LIMIT, first_time, host_times, interleave, poison, relative_error
from torch import Tensor


def first_calls(
    shapes: Iterable[LayerShape], makers: dict[str, Make], settings: Settings
) -> Iterator[Cell]:
    """Seconds of the first forward and backward pass of each shape, compiling and tuning included.

    The peer goes first, one shape after the other, and tunes for as long as it wants: a shortened
    tuning makes it slower for good. What it chooses serves every later cell of this process.
    """
    shapes = list(shapes)
    for name in (SONIC, OURS):
        for shape in shapes if name in makers else ():
            blank = Cell(
                topic="first call", shape=shape.name, case=ROUTINGS[0], what="first call", unit="s"
            )
            yield from guarded(
                f"first call {shape.name} {name}",
                lambda b=blank, n=name, s=shape: [_first_call(b, n, makers[n], s, settings)],
                blank,
            )
            _free()


def _first_call(blank: Cell, name: str, make: Make, shape: LayerShape, settings: Settings) -> Cell:
    made = make(draw(shape, ROUTINGS[0], settings))
    seconds = first_time(made.both, settings)
    print(f"first call {shape.name} {name}: {seconds:.1f} s", flush=True)
    return dataclasses.replace(blank, samples={name: [seconds]})


def measure(
    topic: str, shapes: Iterable[LayerShape], makers: dict[str, Make], settings: Settings
) -> Iterator[Cell]:
    """Every shape under both routings: forward, forward and backward, and our router alone."""
    for shape in shapes:
        for routing in ROUTINGS:
            blank = Cell(
                topic=topic, shape=shape.name, case=routing, what="forward+backward", unit="ms"
            )
            yield from guarded(
                f"{topic} {shape.name} {routing}",
                lambda s=shape, r=routing: _cells(topic, s, r, makers, settings),
                blank,
            )
            _free()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _cells(
    topic: str, shape: LayerShape, routing: str, makers: dict[str, Make], settings: Settings
) -> list[Cell]:
    operands = draw(shape, routing, settings)
    imbalance = operands.imbalance
    layers, errors, failure = compare(operands, makers, settings)
    if failure:
        print(f"CHECK FAILED {topic} {shape.name} {routing}: {failure}", flush=True)
    calls: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {name: layer.forward for name, layer in layers.items()},
        "forward+backward": {name: layer.both for name, layer in layers.items()},
        "router alone": {OURS: _router(operands)} if layers else {},
    }
    flops = {"forward": shape.flops, "forward+backward": 3 * shape.flops, "router alone": 0.0}
    cells = []
    for what, contenders in calls.items():
        cell = Cell(
            topic=topic,
            shape=shape.name,
            case=routing,
            what=what,
            unit="ms",
            flops=flops[what],
            imbalance=imbalance,
            errors=errors if flops[what] else {},
            failure=failure if flops[what] else "",
            samples=interleave(contenders, settings) if contenders else {},
            host_ms=host_times(contenders, settings),
        )
        print(f"{topic} {shape.name} {routing} {what}: {_line(cell)}", flush=True)
        cells.append(cell)
    return cells


def compare(
    operands: Operands, makers: dict[str, Make], settings: Settings
) -> tuple[dict[str, Layer], dict[str, float], str]:
    """Build each contender and hold its output and gradients against ours.

    Returns:
        The layers whose results agree (none, when no peer agrees with ours), the worst relative
        error of each peer, and what was wrong, or an empty string.
    """
    poison(sum(t.nbytes for t in (operands.w_gate_up_E2HD, operands.w_down_EDH)), settings)
    mine = makers[OURS](operands)
    ours = mine.results()
    layers, errors, failures = {OURS: mine}, {}, []
    for name, make in makers.items():
        if name == OURS:
            continue
        try:
            layer = make(operands)
            theirs = layer.results()
        except Exception as error:  # a peer that breaks must not take our numbers with it
            failures.append(f"{name} raised {type(error).__name__}: {error}"[:200])
            continue
        each = {part: relative_error(ours[part], theirs[part]) for part in ours}
        errors[name] = max(each.values(), key=lambda error: (error != error, error))
        wrong = [f"{part} {error:.1e}" for part, error in each.items() if not error < ERROR_LIMIT]
        if wrong:
            failures.append(f"ours and {name} differ in {', '.join(wrong)}")
        else:
            layers[name] = layer
        del theirs
    return layers if len(layers) > 1 else {}, errors, "; ".join(failures)


def _router(operands: Operands) -> Callable[[], object]:
    """Forward and backward of the router that our layer is timed with."""
    x_TD = operands.x_TD.detach().requires_grad_()
    wg_ED = operands.wg_ED.detach().requires_grad_()
    dweights_TK = torch.randn(len(x_TD), operands.top_k, device=x_TD.device)

    def call() -> tuple[Tensor, ...]:
        _, weights_TK = our_route(x_TD, wg_ED, operands.top_k)
        return torch.autograd.grad(weights_TK, (x_TD, wg_ED), dweights_TK)

    return call


def _line(cell: Cell) -> str:
    parts = []
    for name in cell.samples:
        median, tflops, ratio = cell.median(name), cell.tflops(name), cell.ratio(name)
        speed = f" = {tflops:.1f} TFLOP/s" if tflops else ""
        beside = f" (ratio {ratio:.3f})" if ratio and name != OURS else ""
        parts.append(f"{name} {median:.3f} ms{speed}{beside}")
    return ", ".join(parts) or "no numbers"
