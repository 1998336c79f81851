"""The experts of a layer, forward and backward, and the bytes held between the two.

Shapes: R rows, D model width, H hidden width, E experts.
"""

import gc
from collections.abc import Callable, Iterator
from functools import partial

import peers
import torch
from cells import Cell, Contender, Settings, contend
from loads import LOADS, draw_offsets
from olmo_mxfp8 import MXRecipe, WeightCache, mx_swiglu_experts
from timing import in_turn, relative_error
from torch import Tensor

SHAPES = ((65536, 4096, 1536, 16), (131072, 4096, 1536, 128))
TINY = ((256, 128, 128, 4),)
Layer = Callable[[], Tensor]


def measure(settings: Settings) -> Iterator[Cell]:
    """Every shape: speed under every load, and memory."""
    for R, D, H, E in TINY if settings.is_dry else SHAPES:
        problem = _Problem(R, D, H, E, settings)
        for load in LOADS:
            problem.split(load, settings)
            blank = Cell(topic="experts", shape=problem.name, load=load, what="forward+backward")
            makers = {name: partial(problem.contender, name) for name in problem.layers}
            yield from contend(blank, makers, partial(in_turn, settings=settings))
        blank = Cell(topic="memory", shape=problem.name, load=load, what="held for backward")
        yield from _memory(blank, problem, settings)


class _Problem:
    """The operands of one shape, and the layers that take them."""

    def __init__(self, R: int, D: int, H: int, E: int, settings: Settings) -> None:
        options = {"device": settings.device, "dtype": torch.bfloat16}
        self.name = f"{R}x{D}x{H}x{E}"
        self.flops = 18.0 * R * D * H
        self.x = torch.randn(R, D, **options).requires_grad_()
        self.up = torch.randn(E, 2 * H, D, **options).mul_(D**-0.5).requires_grad_()
        self.down = torch.randn(E, D, H, **options).mul_(H**-0.5).requires_grad_()
        self.weights = torch.rand(R, device=settings.device).requires_grad_()
        self.dy = torch.randn(R, D, **options)
        self.leaves = (self.x, self.up, self.down, self.weights)
        self.offsets = torch.empty(E, dtype=torch.int32)
        dry = settings.is_dry
        self.layers: dict[str, Callable[[], Layer]] = {
            "bf16, olmo-experts-gemm": partial(self._in_bf16, "reference" if dry else "triton"),
            "dequantise": partial(self._ours, dry, impl="dequantise"),
            "coarse": partial(self._ours, dry, impl="coarse", granularity=128),
            "coarse, weights each call": partial(
                self._ours, dry, cached=False, impl="coarse", granularity=128
            ),
            "coarse, hidden in MXFP8": partial(
                self._ours, dry, impl="coarse", granularity=128, saved="mxfp8"
            ),
        }

    def split(self, load: str, settings: Settings) -> None:
        """Draw how many rows each expert has."""
        R, E = self.x.shape[0], self.up.shape[0]
        self.offsets = draw_offsets(load, R, E, settings.generator).to(settings.device)

    def contender(self, name: str) -> Contender:
        """Forward and backward of a layer; its outputs and gradients must be near BF16's."""
        layer, yardstick = self.layers[name](), self._in_bf16("reference")

        def both(layer: Layer) -> tuple[Tensor, ...]:
            y = layer()
            return y, *torch.autograd.grad(y, self.leaves, self.dy)

        def error(results: tuple[Tensor, ...]) -> float:
            want = both(yardstick)
            return max(relative_error(a, b) for a, b in zip(results, want, strict=True))

        limit = 0.02 if name.startswith("bf16") else 0.11
        return Contender(call=partial(both, layer), work=self.flops, error=error, limit=limit)

    def _in_bf16(self, impl: str) -> Layer:
        function = peers.experts_gemm().swiglu_experts
        operands = (self.x, self.up, self.down, self.offsets)
        return partial(function, *operands, row_weights_R=self.weights, impl=impl)

    def _ours(self, dry: bool, *, cached: bool = True, **options) -> Layer:
        recipe = MXRecipe(**{**options, **({"impl": "reference"} if dry else {})})
        operands = (self.x, self.up, self.down, self.offsets)
        caches = None
        if cached:
            caches = (WeightCache(self.up, recipe=recipe), WeightCache(self.down, recipe=recipe))
        return partial(
            mx_swiglu_experts, *operands, row_weights_R=self.weights, recipe=recipe, caches=caches
        )


def _memory(blank: Cell, problem: _Problem, settings: Settings) -> Iterator[Cell]:
    for name, make in problem.layers.items():
        try:
            blank.samples[name] = [_held(make(), problem, settings)]
        except (ImportError, ValueError, RuntimeError) as error:
            blank.failures[name] = f"{type(error).__name__}: {error}"[:200]
    held = ", ".join(f"{name} {v[0] / 2**20:.1f} MiB" for name, v in blank.samples.items())
    print(f"memory {blank.shape}: {held}", flush=True)
    yield blank


def _held(layer: Layer, problem: _Problem, settings: Settings) -> float:
    """Bytes from forward to backward, without weights, caches, the rows given and the output.

    BF16 saves its rows without a copy: they are its activations all the same, and are counted.
    """
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = layer()
    for given in (problem.up, problem.down, problem.weights, problem.offsets, y):
        saved.pop(given.untyped_storage().data_ptr(), None)
    del y
    gc.collect()
    return float(sum(saved.values()))
