"""Measure the way from router logits to a row plan beside its peers, and write a dated report.

python packages/olmo-routing/benchmarks [--quick] [--out DIR] [--dry-run]
"""

import argparse
import contextlib
import functools
import importlib.metadata
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

import contenders as c  # noqa: E402
import timing  # noqa: E402

GRAPHED = 10
"""Calls in one graph: replaying costs some microseconds, as much as a kernel."""


@dataclass(slots=True)
class Cell:
    """One shape, one pass, one way of timing: milliseconds a call of each contender."""

    shape: str
    what: str
    how: str
    samples: dict[str, list[float]]
    launches: dict[str, int] = field(default_factory=dict)


def main() -> int:
    """Run what the command line asks for; 1 when a contender broke or disagreed."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="20 repeats, not 100")
    parser.add_argument("--out", type=Path, default=HERE / "reports", help="folder of the report")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU: no real numbers")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; use --dry-run")
    device = "cpu" if options.dry_run else "cuda"
    rounds = 3 if options.dry_run else 20 if options.quick else 100
    seed = torch.seed()
    cells: list[Cell] = []
    failures: list[str] = []
    for shape in c.TINY if options.dry_run else c.SHAPES:
        try:
            for cell in _measure(shape, device, rounds, failures):
                cells.append(cell)
                print(*_rows(cell), sep="\n", flush=True)  # a run that is cut short leaves these
        except Exception as error:  # a peer that breaks must not take the other numbers with it
            failures.append(f"{shape}: {type(error).__name__}: {error}"[:300])
    facts = _facts(device, rounds, seed)
    text = "\n".join(_lines(facts, cells, failures)) + "\n"
    print(text)
    data = json.dumps({"facts": facts, "failures": failures, "cells": [asdict(x) for x in cells]})
    options.out.mkdir(parents=True, exist_ok=True)
    hardware = "-".join(facts["hardware"].lower().replace(",", "").split())
    stem = f"logits-to-plan_{hardware}_{facts['date'][:10]}"
    taken = len(list(options.out.glob(f"{stem}*.json")))  # an older report is never overwritten
    name = f"{stem}-{taken + 1}" if taken else stem
    (options.out / f"{name}.md").write_text(text)
    (options.out / f"{name}.json").write_text(data + "\n")
    return int(any(not failure.startswith("absent") for failure in failures))


def _measure(shape: c.Shape, device: str, rounds: int, failures: list[str]) -> Iterator[Cell]:
    impl = "triton" if device == "cuda" else "reference"
    made, missing = c.contenders(shape, device, impl)
    if missing:
        failures.append(f"absent: sonicmoe: {missing}"[:300])

    def attempt(name: str, what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            failures.append(f"{name}, {shape}, {what}: {type(error).__name__}: {error}"[:300])
            return None

    for name in [name for name in made if name != c.OURS]:
        compare = functools.partial(c.disagreement, made[c.OURS], made[name])
        difference = attempt(name, "comparison", compare)
        if difference != "":
            failures.append(f"{name}, {shape}: {difference or 'left out'}")
            del made[name]
    for what in ("plan alone", "forward", "forward+backward"):
        calls = {name: contender.call(what) for name, contender in made.items()}
        if device == "cpu":
            yield Cell(str(shape), what, "host", timing.interleave(calls, rounds, False))
            continue
        counted = {name: timing.launches(call) for name, call in calls.items()}
        yield Cell(str(shape), what, "eager", timing.interleave(calls, rounds, True), counted)
        graphs = {
            name: attempt(name, "capture", functools.partial(timing.as_graph, call, GRAPHED))
            for name, call in calls.items()
            if made[name].capturable
        }
        times = timing.interleave({name: g for name, g in graphs.items() if g}, rounds, True)
        samples = {name: [t / GRAPHED for t in values] for name, values in times.items()}
        yield Cell(str(shape), what, "graph", samples, counted)


def _facts(device: str, rounds: int, seed: int) -> dict[str, str]:
    describe = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = ""
    with contextlib.suppress(OSError):  # git may be absent
        commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout
    found = {d.name.lower(): d.version for d in importlib.metadata.distributions()}
    versions = {name: found.get(name, "not installed") for name in ("torch", "triton", "sonic-moe")}
    return {
        "command": shlex.join(["python", "packages/olmo-routing/benchmarks", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "hardware": torch.cuda.get_device_name() if device == "cuda" else "CPU, dry run",
        "commit": commit.strip() or "unknown",
        "repeats": f"{rounds} after {timing.WARM_UP} that warm up, in turn",
        "seed": str(seed),
        **versions,
    }


def _lines(facts: dict[str, str], cells: list[Cell], failures: list[str]) -> Iterator[str]:
    yield f"# olmo-routing on {facts['hardware']}, {facts['date'][:10]}: logits to row plan"
    yield ""
    yield "Microseconds a call, medians with [least..most]; `/ ours`: above 1 we are faster. The"
    yield "README of the benchmarks says what is compared and how it is timed."
    yield ""
    yield "| fact | value |"
    yield "|---|---|"
    yield from (f"| {name} | {value} |" for name, value in facts.items())
    yield ""
    yield "| shape | pass | how | contender | us | / ours | launches |"
    yield "|---|---|---|---|---|---|---|"
    for cell in cells:
        yield from _rows(cell)
    yield ""
    yield from (f"- {failure}" for failure in failures)


def _rows(cell: Cell) -> Iterator[str]:
    ours = statistics.median(cell.samples[c.OURS]) if c.OURS in cell.samples else float("nan")
    for name, times in cell.samples.items():
        median, low, high = (f(times) * 1e3 for f in (statistics.median, min, max))
        yield (
            f"| {cell.shape} | {cell.what} | {cell.how} | {name} "
            f"| {median:.1f} [{low:.1f}..{high:.1f}] | {median / ours / 1e3:.2f} "
            f"| {cell.launches.get(name, '-')} |"
        )


if __name__ == "__main__":
    sys.exit(main())
