"""Measure olmo-distopt beside its peers, and write a dated report.

python packages/olmo-distopt/benchmarks [--only update,muon,memory,ranks] [--quick] [--dry-run]
"""

import argparse
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

import muon  # noqa: E402
import ranks  # noqa: E402
import resident  # noqa: E402
import update  # noqa: E402
from cells import Cell, Settings  # noqa: E402
from timing import interleave, median  # noqa: E402

TOPICS = {
    "update": update.measure,
    "muon": muon.measure,
    "memory": resident.measure,
    "ranks": ranks.measure,
}


def main() -> int:
    """Run what the command line asks for; 1 when a check failed or a contender broke."""
    options = _options()
    dry = options.dry_run
    if dry:
        torch.set_num_threads(1)
    num_ranks = 2 if dry else torch.cuda.device_count()
    settings = Settings(
        device="cpu" if dry else "cuda",
        rounds=5 if options.quick else 30,
        dry=dry,
        ranks=num_ranks,
    )
    folder = options.out or (
        Path(tempfile.mkdtemp(prefix="benchmarks-")) if dry else HERE / "reports"
    )
    facts = _facts(settings)
    cells: list[Cell] = []
    failures: list[str] = []
    for topic in options.only:
        if topic == "ranks" and num_ranks < 2:
            failures.append("ranks: left out, it needs two devices")
            continue
        try:
            for cell in TOPICS[topic](settings):
                cells.append(cell)
                print(*_lines(cell), sep="\n", flush=True)  # what a run cut short leaves
        except Exception as error:  # a broken topic must not take the other numbers with it
            failures.append(f"{topic}: {type(error).__name__}: {error}"[:1000])
    path = _write(folder, facts, cells, failures, options.only)
    print(f"wrote {path}")
    return int(any("left out" not in failure for failure in failures))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(TOPICS),
        help="topics, joined by commas",
    )
    parser.add_argument("--quick", action="store_true", help="5 rounds, not 30")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU: no real numbers")
    parser.add_argument("--out", type=Path, help="folder of the report")
    options = parser.parse_args()
    unknown = sorted(set(options.only) - set(TOPICS))
    if unknown:
        parser.error(f"--only takes {', '.join(TOPICS)}, got {', '.join(unknown)}")
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; use --dry-run")
    return options


def _facts(settings: Settings) -> dict[str, str]:
    """What a reader needs to judge and to repeat the numbers."""
    facts = {
        "command": shlex.join(["python", "packages/olmo-distopt/benchmarks", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _said("git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rounds": f"{settings.rounds} in turn, the median and the range are shown",
    }
    if settings.dry:
        return facts | {"hardware": "CPU, dry run: no number here means anything"}
    source = torch.zeros(1 << 30, device="cuda")
    target = torch.empty_like(source)
    copy = median(interleave({"copy": lambda: target.copy_(source)}, 20)["copy"])
    return facts | {
        "hardware": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        "triton": importlib.metadata.version("triton"),
        "cuda": str(torch.version.cuda),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "copy, bytes read and written": f"{2 * source.nbytes / copy / 1e9:.2f} TB/s",
    }


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0]


def _lines(cell: Cell) -> list[str]:
    lines = [f"### {cell.what}", ""]
    if cell.samples:
        lines += ["| contender | ms | range | TB/s |", "|---|---|---|---|"]
    for name, times in cell.samples.items():
        speed = f"{cell.num_bytes / median(times) / 1e9:.2f}" if cell.num_bytes else ""
        lines.append(
            f"| {name} | {median(times):.3f} | {min(times):.3f}-{max(times):.3f} | {speed} |"
        )
    if cell.notes:
        lines += ["", "```", *cell.notes, "```"]
    return [*lines, ""]


def _write(
    folder: Path, facts: dict[str, str], cells: list[Cell], failures: list[str], topics: list[str]
) -> Path:
    """Write the report and its data; an older report is never overwritten."""
    lines = ["# olmo-distopt beside its peers", ""]
    lines += [f"- {key}: {value}" for key, value in facts.items()] + [""]
    lines += [f"- FAILED {failure}" for failure in failures] + [""]
    for topic in topics:
        found = [line for cell in cells if cell.topic == topic for line in _lines(cell)]
        lines += [f"## {topic}", "", *found] if found else []
    hardware = "dry-run" if facts["hardware"].startswith("CPU") else facts["hardware"].lower()
    stem = f"{'-'.join(topics)}_{'-'.join(hardware.split())}_{facts['date'][:10]}"
    folder.mkdir(parents=True, exist_ok=True)
    taken = len(list(folder.glob(f"{stem}*.json")))
    stem = f"{stem}-{taken + 1}" if taken else stem
    data = {"facts": facts, "failures": failures, "cells": [asdict(cell) for cell in cells]}
    (folder / f"{stem}.json").write_text(json.dumps(data) + "\n")
    path = folder / f"{stem}.md"
    path.write_text("\n".join(lines))
    return path


if __name__ == "__main__":
    sys.exit(main())
