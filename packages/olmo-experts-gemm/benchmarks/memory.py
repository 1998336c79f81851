"""Bytes that a layer holds between its forward and its backward pass, and at its peak.

Counted by torch's allocator above what was allocated before the forward pass, which is the weights,
the tokens and the incoming gradient. The output is part of both numbers, the gradients of the
weights are part of the peak. A pass before that fills whatever a contender keeps for good.
"""

import gc
from collections.abc import Iterable, Iterator

import torch
from cells import OURS, Cell, Settings, guarded
from contenders import Make, draw, packed
from shapes import ROUTINGS, LayerShape


def measure(
    shapes: Iterable[LayerShape], makers: dict[str, Make], settings: Settings
) -> Iterator[Cell]:
    """Cells of each shape: held, held with activations in MXFP8 if they can be, and peak."""
    for shape in shapes:
        blank = Cell(topic="memory", shape=shape.name, case=ROUTINGS[0], what="held", unit="bytes")
        yield from guarded(
            f"memory {shape.name}", lambda s=shape: _cells(s, makers, settings), blank
        )


def _cells(shape: LayerShape, makers: dict[str, Make], settings: Settings) -> list[Cell]:
    held: dict[str, list[float]] = {}
    peak: dict[str, list[float]] = {}
    failures = []
    for name, make in makers.items():
        try:
            held_bytes, peak_bytes = _bytes(shape, make, settings)
        except Exception as error:  # one contender's failure leaves the others' numbers standing
            failures.append(f"{name} raised {type(error).__name__}: {error}"[:200])
            continue
        held[name], peak[name] = [held_bytes], [peak_bytes]
    bytes_of = {"held": held, "peak": peak}
    if (make := packed(shape, settings.impl)) is not None:
        mine, _ = _bytes(shape, make, settings)
        bytes_of["held, ours in MXFP8"] = {**held, OURS: [mine]}
    cells = [
        Cell(
            topic="memory",
            shape=shape.name,
            case=ROUTINGS[0],
            what=what,
            unit="bytes",
            samples=samples,
            failure="; ".join(failures),
        )
        for what, samples in bytes_of.items()
    ]
    for cell in cells:
        gib = ", ".join(f"{n} {v[0] / 2**30:.3f} GiB" for n, v in cell.samples.items())
        print(f"memory {shape.name} {cell.what}: {gib} {cell.failure}", flush=True)
    return cells


def _bytes(shape: LayerShape, make: Make, settings: Settings) -> tuple[float, float]:
    layer = make(draw(shape, ROUTINGS[0], settings))
    layer.both()
    if settings.device != "cuda":
        return _saved_bytes(layer.forward, layer.leaves), 0.0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y_TD = layer.forward()
    held = torch.cuda.memory_allocated() - before
    gradients = torch.autograd.grad(y_TD, layer.leaves, layer.dy_TD)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del gradients
    return float(held), float(peak)


def _saved_bytes(forward, leaves: tuple[torch.Tensor, ...]) -> float:
    """What autograd saves beyond the leaves, and the output: a stand-in where nothing counts."""
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        note(forward())
    for leaf in leaves:
        sizes.pop(leaf.untyped_storage().data_ptr(), None)
    return float(sum(sizes.values()))
