"""Measure olmo-experts-gemm beside its peers, and write a dated report.

python packages/olmo-experts-gemm/benchmarks [--only product,layer,memory,fine] [--quick]
"""

import argparse
import dataclasses
import secrets
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))
# The gate of our layer, and a packer of what it saves, if this is the whole repository.
for other in ("olmo-routing", "olmo-mxfp8"):
    sys.path.append(str(HERE.parent.parent / other / "src"))

import contenders  # noqa: E402
import layer  # noqa: E402
import machine  # noqa: E402
import memory  # noqa: E402
import product  # noqa: E402
import report  # noqa: E402
import shapes  # noqa: E402
import summary  # noqa: E402
from cells import Cell, Settings  # noqa: E402

TOPICS = ("product", "layer", "memory", "fine")


def main() -> int:
    """Run what the command line asks for; 1 when a check failed or a contender broke."""
    options = _options()
    settings, seed = _settings(options)
    folder = options.out or (
        Path(tempfile.mkdtemp(prefix="benchmarks-")) if options.dry_run else HERE / "reports"
    )
    runs: list[report.Facts] = []
    cells: list[Cell] = []
    for path in options.merge:
        more_runs, more_cells = report.read(path, len(runs))
        runs += more_runs
        cells += more_cells
    if options.only:
        command = shlex.join(["python", "packages/olmo-experts-gemm/benchmarks", *sys.argv[1:]])
        runs.append(machine.describe(command, seed, settings))
    name = _name(folder, runs, cells, options.only)

    try:
        for topic, measured in _topics(options, settings) if options.only else ():
            for cell in measured:
                cells.append(dataclasses.replace(cell, run=len(runs) - 1))
                # After every cell, so that a run that is cut short leaves what it has.
                report.write_numbers(folder, name, runs, cells)
            print(f"== {topic} done", flush=True)
    finally:
        paths = report.write(folder, name, runs, cells)
        print(summary.compact(cells, summary.summarise(cells, report.on_h200(runs))))
        print("wrote", *paths)
    return int(any(cell.failure for cell in cells))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--only", default=None, help=f"topics, of {','.join(TOPICS)}; all of them")
    parser.add_argument("--shapes", default="", help="names of shapes, as reports give them; all")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, for a first look")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the report; benchmarks/reports, or a temporary one for --dry-run",
    )
    parser.add_argument("--impl", help="our implementation; triton")
    parser.add_argument("--seed", type=int, help="of the operands; a fresh one")
    parser.add_argument(
        "--merge",
        type=Path,
        action="append",
        default=[],
        help="a JSON file of an earlier run to put into the report; without --only nothing runs",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on the CPU: everything but the numbers"
    )
    options = parser.parse_args()
    given = options.only.split(",") if options.only else ([] if options.merge else list(TOPICS))
    wrong = [topic for topic in given if topic not in TOPICS]
    if wrong:
        parser.error(f"--only takes {', '.join(TOPICS)}, got {', '.join(wrong)}")
    options.only = [topic for topic in TOPICS if topic in given]
    tables = _tables(options.dry_run)
    known = {shape.name for topic in options.only for shape in tables[topic]}
    options.shapes = set(options.shapes.split(",")) if options.shapes else known
    if not options.shapes <= known:
        unknown = ", ".join(sorted(options.shapes - known))
        parser.error(f"--shapes takes {', '.join(sorted(known))}, got {unknown}")
    if options.only and not options.dry_run and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; use --dry-run")
    return options


def _tables(dry: bool) -> dict[str, tuple]:
    products = shapes.TINY_PRODUCTS if dry else shapes.PRODUCTS
    layers = shapes.TINY_LAYERS if dry else shapes.LAYERS
    fine = shapes.TINY_FINE if dry else shapes.FINE
    return {"product": products, "layer": layers, "memory": layers + fine, "fine": fine}


def _settings(options: argparse.Namespace) -> tuple[Settings, int]:
    seed = secrets.randbits(31) if options.seed is None else options.seed
    torch.manual_seed(seed)
    settings = Settings(
        device="cpu" if options.dry_run else "cuda",
        # Not "auto", which may choose the very product that stands beside ours.
        impl=options.impl or ("reference" if options.dry_run else "triton"),
        budget_s=0.15 if options.quick else 0.4,
        least_rounds=5 if options.quick else 7,
        generator=torch.Generator().manual_seed(seed),
    )
    return settings, seed


def _name(folder: Path, runs: list[report.Facts], cells: list[Cell], only: list[str]) -> str:
    present = {cell.topic for cell in cells} | set(only)
    topics = [topic for topic in TOPICS if topic in present]
    topic = "all" if len(topics) == len(TOPICS) else "-".join(topics)
    hardware = machine.slug(runs[0]["hardware"])
    return report.free_name(folder, f"{topic}_{hardware}_{runs[0]['date'][:10]}")


def _topics(
    options: argparse.Namespace, settings: Settings
) -> Iterator[tuple[str, Iterator[Cell]]]:
    """Each topic's name, and its cells, which are measured as they are asked for."""
    chosen = {
        topic: [shape for shape in table if shape.name in options.shapes]
        for topic, table in _tables(options.dry_run).items()
        if topic in options.only
    }
    if chosen.get("product"):
        yield "product", product.measure(chosen["product"], settings)
    layers = {topic: chosen[topic] for topic in ("layer", "fine", "memory") if chosen.get(topic)}
    if not layers:
        return
    makers, missing = contenders.contenders(settings.impl)
    if missing:
        print(f"SonicMoE is not here, so only torch's layer stands beside ours: {missing}")
    distinct = list(dict.fromkeys(shape for table in layers.values() for shape in table))
    yield "first call", layer.first_calls(distinct, makers, settings)
    for topic, table in layers.items():
        if topic == "memory":
            yield topic, memory.measure(table, makers, settings)
        else:
            yield topic, layer.measure(topic, table, makers, settings)


if __name__ == "__main__":
    sys.exit(main())
