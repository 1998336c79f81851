"""How fast is attention under windows and documents, beside SDPA with the same mask?

python apps/trainer/benchmarks/attention [--rounds 7] [--out FOLDER] [--dry-run]

Contenders take turns. Prints the table, and writes it with every repeat.
"""

import argparse
import json
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch
from olmo_trainer.model.visibility import Visibility
from torch import Tensor
from torch.nn import functional as F

REPORTS = Path(__file__).resolve().parent.parent / "reports"
WARM_UP = 2
TOLERANCE = 0.02  # of the largest value: the contenders round BF16 probabilities in other orders


class Shape(NamedTuple):
    """One sequence: S positions, A query heads, G key/value heads, C channels a head."""

    num_positions: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class View(NamedTuple):
    """Who sees whom; a window of 0 and documents of 0 positions are without limit."""

    window: int
    document: int

    def __str__(self) -> str:
        parts = [f"window {self.window}"] if self.window else ["full"]
        return ", ".join(parts + [f"documents of {self.document}"] * bool(self.document))


BIG, TINY = Shape(8192, 32, 8, 128), Shape(64, 4, 2, 16)
VIEWS = (View(0, 0), View(4096, 0), View(1024, 0), View(0, 1024), View(0, 300), View(1024, 1024))
TINY_VIEWS = (View(0, 0), View(16, 0), View(0, 20))

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def contenders_of(shape: Shape, view: View, device: torch.device) -> dict[str, Attend]:
    """Return the trainer's attention, and SDPA with a mask and with nothing but causality."""
    positions = torch.arange(shape.num_positions, device=device)
    documents = (positions // view.document)[None] if view.document else None
    visibility = Visibility(shape.num_positions, device, documents)
    mask = visibility.mask(view.window or shape.num_positions)
    repeats = shape.num_heads // shape.num_kv_heads

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return visibility.attend(query, key, value, window=view.window)

    def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Every head with keys of its own: with a mask and shared ones SDPA has no fused kernel.
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return {"ours": ours, "SDPA, mask": masked, "SDPA, causal alone": causal}


def measure(shape: Shape, view: View, device: torch.device, rounds: int) -> dict[str, object]:
    """Time forward, and forward with backward, of all contenders in turn; milliseconds.

    Raises:
        RuntimeError: A contender's result or gradient is not that of SDPA with the mask.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    inputs = [
        torch.randn(
            (1, count, shape.num_positions, shape.head_dim),
            device=device,
            dtype=dtype,
            requires_grad=True,
        )
        for count in heads
    ]
    gradient = torch.randn_like(inputs[0])
    contenders = contenders_of(shape, view, device)
    _check(contenders, inputs, gradient)
    times: dict[str, dict[str, list[float]]] = {
        way: {name: [] for name in contenders} for way in ("forward", "with backward")
    }
    for repeat in range(WARM_UP + rounds):
        for name, attend in contenders.items():
            with torch.no_grad():
                forward = _time(lambda attend=attend: attend(*inputs), device)
            both = _time(
                lambda attend=attend: torch.autograd.grad(attend(*inputs), inputs, gradient), device
            )
            if repeat >= WARM_UP:
                times["forward"][name].append(forward)
                times["with backward"][name].append(both)
    return {"view": str(view), "times": times}


def _check(contenders: dict[str, Attend], inputs: Sequence[Tensor], gradient: Tensor) -> None:
    made = {}
    for name in ("ours", "SDPA, mask"):
        result = contenders[name](*inputs)
        made[name] = (result, *torch.autograd.grad(result, inputs, gradient))
    for mine, theirs in zip(made["ours"], made["SDPA, mask"], strict=True):
        off = (mine - theirs).abs().max() / theirs.abs().max()
        if not off <= TOLERANCE:
            raise RuntimeError(f"the contenders must agree, and are {off:.3g} of the largest apart")


def _time(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def table_of(cells: Sequence[dict[str, object]]) -> list[str]:
    """Return Markdown: medians with their spread in milliseconds, and ours as a ratio."""
    lines = ["| view | | ours | SDPA, mask | SDPA, causal alone | speed over SDPA with the mask |"]
    lines.append("|---" * 6 + "|")
    for cell in cells:
        times = cell["times"]
        assert isinstance(times, dict)
        for way, by_name in times.items():
            medians = {name: statistics.median(each) for name, each in by_name.items()}
            shown = [
                f"{medians[name]:.2f} [{min(each):.2f}..{max(each):.2f}]"
                for name, each in by_name.items()
            ]
            ratio = medians["SDPA, mask"] / medians["ours"]
            lines.append(f"| {cell['view']} | {way} | {' | '.join(shown)} | {ratio:.2f} |")
    return lines


def main() -> int:
    """Measure every view, and write the report."""
    parser = argparse.ArgumentParser(prog="attention", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="repeats of each; default 7")
    parser.add_argument("--out", type=Path, help="folder of the report; default: reports/")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("attention is measured on a CUDA device, and there is none; try --dry-run")
    device = torch.device("cpu" if options.dry_run else "cuda")
    shape, views = (TINY, TINY_VIEWS) if options.dry_run else (BIG, VIEWS)
    cells = [measure(shape, view, device, options.rounds) for view in views]
    name = "dry run, no number means anything" if options.dry_run else torch.cuda.get_device_name()
    facts = {
        "command": shlex.join(["python", "apps/trainer/benchmarks/attention", *sys.argv[1:]]),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "device": name,
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "shape": f"1 sequence, {shape._asdict()}, {'fp32' if options.dry_run else 'bf16'}",
        "repeats": f"{options.rounds} in turn, after {WARM_UP}: median [least..most], milliseconds",
    }
    lines = [f"# Attention under windows and documents, {facts['date'][:10]}", ""]
    lines += table_of(cells)
    lines += ["", "| fact | value |", "|---|---|"]
    lines += [f"| {fact} | {value} |" for fact, value in facts.items()]
    folder = options.out or (Path(tempfile.mkdtemp()) if options.dry_run else REPORTS)
    folder.mkdir(parents=True, exist_ok=True)
    kind = "dry-run" if options.dry_run else name.lower().split()[-1]
    path = folder / f"attention_{kind}_{facts['date'][:10]}.md"
    path.write_text("\n".join(lines) + "\n")
    path.with_suffix(".json").write_text(json.dumps({"facts": facts, "cells": cells}) + "\n")
    print("\n".join(lines[2:]))
    print("wrote", path, path.with_suffix(".json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
