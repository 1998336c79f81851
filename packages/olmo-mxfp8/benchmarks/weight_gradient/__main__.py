"""The weight gradient on FP8 units beside the one in BF16.

python packages/olmo-mxfp8/benchmarks/weight_gradient [--quick] [--out FOLDER] [--dry-run]

    dw[e] = dy_e.T @ x_e        dy (R, F) in BF16, x (R, D) in MXFP8 along D, as a layer has them

Shapes: R rows, F output width, D input width, E experts.
"""

import argparse
import json
import secrets
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "src")]

import machine  # noqa: E402
import peers  # noqa: E402
from cells import Cell, Contender, Settings, contend  # noqa: E402
from loads import LOADS, draw_offsets  # noqa: E402
from olmo_mxfp8 import MXRecipe, MXTensor, dequantize, quantize  # noqa: E402
from olmo_mxfp8._functional import weight_gradient  # noqa: E402
from olmo_mxfp8._groups import Groups  # noqa: E402
from olmo_mxfp8._product_impl import ProductImpl  # noqa: E402
from olmo_mxfp8._token_kernels import quantize_tokens  # noqa: E402
from report import free_name  # noqa: E402
from timing import in_turn, relative_error  # noqa: E402
from torch import Tensor  # noqa: E402

_SHAPES = ((65536, 4096, 4096, 16), (131072, 3072, 4096, 128), (65536, 1024, 1024, 16))
_TINY = ((300, 256, 128, 4),)
_HIGH = MXRecipe(granularity=128)
_FP8 = MXRecipe(granularity=128, weight_grad="mxfp8")


def main() -> int:
    """Measure every shape under every load, and write the report; 1 when a result was wrong."""
    options = _options()
    seed = secrets.randbits(31) if options.seed is None else options.seed
    torch.manual_seed(seed)
    settings = Settings(
        device="cpu" if options.dry_run else "cuda",
        budget_s=0.15 if options.quick else 0.4,
        least_rounds=5 if options.quick else 7,
        generator=torch.Generator().manual_seed(seed),
    )
    folder = options.out or (
        Path(tempfile.mkdtemp()) if options.dry_run else HERE.parent / "reports"
    )
    command = ["python", "packages/olmo-mxfp8/benchmarks/weight_gradient", *sys.argv[1:]]
    facts = machine.describe(shlex.join(command), seed, settings)
    name = free_name(folder, f"weight-gradient_{machine.slug(facts)}_{facts['date'][:10]}")
    cells: list[Cell] = []
    try:
        for R, F, D, E in _TINY if settings.is_dry else _SHAPES:
            for load in LOADS:
                cells.extend(_cells(R, F, D, E, load, settings))
    finally:
        print("wrote", *_write(folder, name, facts, cells))
    return int(any("the result is off" in why for c in cells for why in c.failures.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="weight_gradient", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, for a first look")
    parser.add_argument("--out", type=Path, help="folder of the report; benchmarks/reports")
    parser.add_argument("--seed", type=int, help="of the operands; a fresh one")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on the CPU: everything but the numbers"
    )
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; use --dry-run")
    return options


def _cells(R: int, F: int, D: int, E: int, load: str, settings: Settings) -> Iterator[Cell]:
    offsets_E = draw_offsets(load, R, E, settings.generator).to(settings.device)
    shape = f"{R}x{F}x{D}x{E}"
    dy_RF, x_RD = (
        torch.randn(R, width, device=settings.device, dtype=torch.bfloat16) for width in (F, D)
    )
    rows = quantize(x_RD, granularity=128)
    time = partial(in_turn, settings=settings)
    blank = Cell(topic="product", shape=shape, load=load, what="weight gradient")
    yield from contend(blank, _products(dy_RF, rows, offsets_E, settings.is_dry), time)
    if not settings.is_dry and load == LOADS[0]:
        blank = Cell(topic="quantise", shape=shape, load=load, what="along tokens")
        yield from contend(blank, _passes(dy_RF, rows, offsets_E), time)


def _products(
    dy_RF: Tensor, rows: MXTensor, offsets_E: Tensor, is_dry: bool
) -> dict[str, Callable[[], Contender]]:
    grouped_mm = peers.torch_grouped_mm()
    x_RD = dequantize(rows, torch.bfloat16)
    flops = 2.0 * dy_RF.numel() * rows.shape[1]
    want = grouped_mm(dy_RF.mT, x_RD, offs=offsets_E)
    # Of an expert without rows torch writes nothing.
    counts_E = offsets_E.diff(prepend=offsets_E.new_zeros(1))
    want.masked_fill_((counts_E == 0)[:, None, None], 0)
    impl: ProductImpl = "reference" if is_dry else "coarse"
    groups = Groups(offsets_E.tolist() if is_dry else None, offsets_E)

    def contender(call: Callable[[], Tensor], limit: float) -> Contender:
        def error(dw: Any) -> float:
            return relative_error(dw, want)

        return Contender(call=call, work=flops, error=error, limit=limit)

    def of_layer(recipe: MXRecipe, limit: float) -> Contender:
        arguments = (dy_RF, rows, groups, recipe, impl, torch.bfloat16)
        return contender(partial(weight_gradient, *arguments), limit)

    def kernel_alone() -> Contender:
        from olmo_mxfp8._triton.token_product import token_product

        a, b = _quantised(dy_RF, rows, offsets_E)
        codes = [each[0].view(torch.float8_e4m3fn) for each in (a, b)]
        arguments = (codes[0], a[1], codes[1], b[1], offsets_E, dy_RF.shape[0], torch.bfloat16)
        return contender(partial(token_product, *arguments), 0.045)

    makers: dict[str, Callable[[], Contender]] = {
        "bf16, torch": lambda: Contender(
            call=lambda: grouped_mm(dy_RF.mT, x_RD, offs=offsets_E), work=flops
        ),
        "high: dequantise x, multiply BF16": partial(of_layer, _HIGH, 0.01),
        "FP8: quantise both, multiply": partial(of_layer, _FP8, 0.045),
    }
    if not is_dry:
        makers["FP8, operands quantised"] = kernel_alone
    return makers


def _passes(dy_RF: Tensor, rows: MXTensor, offsets_E: Tensor) -> dict[str, Callable[[], Contender]]:
    """Bytes that must be moved a second, beside a copy."""
    copy = torch.empty_like(dy_RF)
    codes = rows.data.view(torch.uint8)
    values, quantised = dy_RF.numel(), codes.numel()

    def copying() -> Contender:
        return Contender(call=lambda: copy.copy_(dy_RF), work=4.0 * values)

    def of_values() -> Contender:
        arguments = (dy_RF, None, None, offsets_E, "e4m3", True)
        return Contender(call=partial(quantize_tokens, *arguments), work=3.0 * values)

    def of_codes() -> Contender:
        arguments = (codes, rows.scales, "e4m3", offsets_E, "e4m3", True)
        work = (2 + 1 / 32) * quantised
        return Contender(call=partial(quantize_tokens, *arguments), work=work)

    return {"copy": copying, "BF16 to FP8": of_values, "MXFP8 to FP8": of_codes}


def _quantised(dy_RF: Tensor, rows: MXTensor, offsets_E: Tensor):
    a = quantize_tokens(dy_RF, None, None, offsets_E, "e4m3", True)
    codes = rows.data.view(torch.uint8)
    return a, quantize_tokens(codes, rows.scales, "e4m3", offsets_E, "e4m3", True)


def _write(folder: Path, name: str, facts: dict[str, str], cells: Sequence[Cell]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    text, data = folder / f"{name}.md", folder / f"{name}.json"
    text.write_text("\n".join(_lines(name, facts, cells)) + "\n")
    data.write_text(json.dumps({"facts": facts, "cells": [asdict(c) for c in cells]}) + "\n")
    return [text, data]


def _lines(name: str, facts: dict[str, str], cells: Sequence[Cell]) -> Iterator[str]:
    yield f"# The weight gradient on FP8 units, {facts['hardware']}, {facts['date'][:10]}"
    yield ""
    yield (
        "`dw[e] = dy_e.T @ x_e` of random normal operands, R x F x D x E. Contenders take turns; "
        "CUDA events, medians [least..most]; each result is checked against torch's in BF16 before "
        "it is timed. A rate is TFLOP/s, and of `along tokens` TB/s of the bytes that must move."
    )
    yield ""
    yield "| shape | load | what | contender | rate | of the first | ms | error |"
    yield "|---|---|---|---|---|---|---|---|"
    for cell in cells:
        first = next(iter(cell.samples), "")
        for who, samples in cell.samples.items():
            rate, beside = cell.rate(who) or 0.0, cell.rate(first) or 1.0
            error = f"{cell.errors[who]:.1e}" if who in cell.errors else "-"
            spread = f"{cell.median(who):.3f} [{min(samples):.3f}..{max(samples):.3f}]"
            yield (
                f"| {cell.shape} | {cell.load} | {cell.what} | {who} | {rate:.2f} | "
                f"{rate / beside:.2f} | {spread} | {error} |"
            )
    for cell in cells:
        for who, why in cell.failures.items():
            yield f"\nMissing: {cell.shape} {cell.load}, {who}: {' '.join(why.split())}"
    yield from ("", "| fact | value |", "|---|---|")
    yield from (f"| {fact} | {value} |" for fact, value in facts.items())
    yield from ("", f"Every repeat: [{name}.json]({name}.json).")


if __name__ == "__main__":
    sys.exit(main())
