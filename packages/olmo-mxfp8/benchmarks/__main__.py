"""Measure olmo-mxfp8 beside its peers, and write a dated report.

python packages/olmo-mxfp8/benchmarks [--only quantise,product,width,experts] [--quick]
"""

import argparse
import secrets
import shlex
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))
# The BF16 experts beside which ours stand, if this is the whole repository.
sys.path.append(str(HERE.parent.parent / "olmo-experts-gemm" / "src"))

import experts  # noqa: E402
import machine  # noqa: E402
import product  # noqa: E402
import quantise  # noqa: E402
import report  # noqa: E402
from cells import Cell, Settings  # noqa: E402

TOPICS = {
    "quantise": quantise.measure,
    "product": product.measure,
    "width": product.measure_widths,
    "experts": experts.measure,
}


def main() -> int:
    """Run what the command line asks for; 1 when a result was wrong."""
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
        Path(tempfile.mkdtemp(prefix="benchmarks-")) if options.dry_run else HERE / "reports"
    )
    command = shlex.join(["python", "packages/olmo-mxfp8/benchmarks", *sys.argv[1:]])
    facts = machine.describe(command, seed, settings)
    topics = "all" if len(options.only) == len(TOPICS) else "-".join(options.only)
    name = report.free_name(folder, f"{topics}_{machine.slug(facts)}_{facts['date'][:10]}")
    cells: list[Cell] = []
    try:
        for topic in options.only:
            for cell in TOPICS[topic](settings):
                cells.append(cell)
    finally:
        paths = report.write(folder, name, facts, cells)
        for row in report.verdicts(cells):
            print(" | ".join(row))
        print("wrote", *paths)
    return int(any("the result is off" in why for c in cells for why in c.failures.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--only", default=",".join(TOPICS), help="topics; all of them")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, for a first look")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the report; benchmarks/reports, or a temporary one for --dry-run",
    )
    parser.add_argument("--seed", type=int, help="of the operands; a fresh one")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on the CPU: everything but the numbers"
    )
    options = parser.parse_args()
    given = options.only.split(",")
    wrong = [topic for topic in given if topic not in TOPICS]
    if wrong:
        parser.error(f"--only takes {', '.join(TOPICS)}, got {', '.join(wrong)}")
    options.only = [topic for topic in TOPICS if topic in given]
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; use --dry-run")
    return options


if __name__ == "__main__":
    sys.exit(main())
