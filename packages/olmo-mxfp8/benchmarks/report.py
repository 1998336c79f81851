"""A run as a Markdown report and a JSON file with every repeat."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from cells import Cell
from goals import GOALS, winning_widths, worst

_TITLES = {
    "quantise": ("Quantise and dequantise", "TB/s"),
    "product": ("Grouped products", "TFLOP/s"),
    "width": ("From which width coarse products win", "TFLOP/s"),
    "experts": ("Experts of a layer, forward and backward", "TFLOP/s"),
    "memory": ("Bytes held for backward", "MiB"),
}


def free_name(folder: Path, name: str) -> str:
    """`name`, or `name-2` and so on where there is a report of that name."""
    names = [name, *(f"{name}-{number}" for number in range(2, 1000))]
    return next(n for n in names if not (folder / f"{n}.json").exists())


def write(folder: Path, name: str, facts: dict[str, str], cells: Sequence[Cell]) -> list[Path]:
    """Write `name.md` and `name.json` into `folder`, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    text, data = folder / f"{name}.md", folder / f"{name}.json"
    text.write_text("\n".join(_lines(name, facts, cells)) + "\n")
    data.write_text(json.dumps({"facts": facts, "cells": [asdict(c) for c in cells]}) + "\n")
    return [text, data]


def verdicts(cells: Sequence[Cell]) -> Iterator[list[str]]:
    """A row a goal."""
    for goal in GOALS:
        found = worst(goal, cells)
        what = f"{goal.topic}, {goal.what}"
        bars = f"{goal.least:.2f} / {goal.aim:.2f}"
        if found is None:
            yield [what, f"{goal.ours} : {goal.peer}", "-", bars, "not measured"]
            continue
        ratio, cell, count = found
        where = f"{cell.shape} {cell.load}".strip()
        verdict = "met" if goal.is_met(ratio) else "missed"
        worst_of = f"{ratio:.3f} ({where}, worst of {count})"
        yield [what, f"{goal.ours} : {goal.peer}", worst_of, bars, verdict]


def _lines(name: str, facts: dict[str, str], cells: Sequence[Cell]) -> Iterator[str]:
    yield f"# olmo-mxfp8 on {facts['hardware']}, {facts['date'][:10]}"
    yield ""
    yield (
        "Contenders take turns within a cell; CUDA events, medians with [least..most]; random "
        "normal operands, bfloat16 but for the float32 weights of caches, each result checked "
        "before it is timed. `copy` reads and writes the bytes of the same tensor; a rate counts "
        "the bytes that the operation must move."
    )
    yield ""
    yield from _table(("fact", "value"), facts.items())
    yield "## Goals"
    yield ""
    yield from _table(("what", "ratio", "measured", "first bar / aim", "verdict"), verdicts(cells))
    for topic, (title, unit) in _TITLES.items():
        of_topic = [cell for cell in cells if cell.topic == topic]
        if not of_topic:
            continue
        yield f"## {title}"
        yield ""
        head = ("shape", "load", "what", "contender", unit, "ms", "error")
        yield from _table(head, (row for cell in of_topic for row in _rows(cell)))
        if topic == "width":
            yield from _widths(of_topic)
    missing = [
        [cell.topic, cell.shape, cell.load, cell.what, who, why.replace("|", "/")]
        for cell in cells
        for who, why in cell.failures.items()
    ]
    if missing:
        yield "## Missing"
        yield ""
        yield from _table(("topic", "shape", "load", "what", "contender", "why"), missing)
    yield f"Every repeat: [{name}.json]({name}.json)."


def _rows(cell: Cell) -> Iterator[list[str]]:
    for name, samples in cell.samples.items():
        median = cell.median(name) or 0.0
        rate = cell.rate(name)
        error = f"{cell.errors[name]:.1e}" if name in cell.errors else "-"
        where = [cell.shape, cell.load, cell.what, name]
        if cell.topic == "memory":
            yield [*where, f"{median / 2**20:.1f}", "-", "-"]
        else:
            spread = f"{median:.3f} [{min(samples):.3f}..{max(samples):.3f}]"
            yield [*where, "-" if rate is None else f"{rate:.2f}", spread, error]


def _widths(cells: Sequence[Cell]) -> Iterator[str]:
    found = list(winning_widths(cells))
    if not found:
        return
    wins = [shape for shape, won in found if won]
    yield (
        f"Coarse products, with the rows quantised in each call, beat BF16 at: {', '.join(wins)}."
        if wins
        else "Coarse products, with the rows quantised in each call, beat BF16 at none of these."
    )
    yield ""


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    head = list(head)
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(" ".join(cell.split()) for cell in row) + " |"
    yield ""
