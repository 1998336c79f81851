"""Does it train in MXFP8? Loss and gradient norm beside BF16, same seed and data.

python apps/trainer/benchmarks/precision [--device cuda] [--recipes toy,mid] [--seeds 0,1,2]

Each run is the trainer in a process of its own, several side by side; numbers come from their
`metrics.jsonl`. The report is written again after every run that ends, so a stop loses only the
runs that were under way; `--render A.json B.json` joins what several calls have measured.
"""

import argparse
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPORTS = HERE.parent / "reports"
sys.path.insert(0, str(HERE))

import report  # noqa: E402
from cases import (  # noqa: E402
    DEFAULT_PRECISIONS,
    PRECISIONS,
    RECIPES,
    Case,
    setting,
    settings_of,
)
from measures import last_tenth  # noqa: E402
from olmo_trainer.overrides import apply_overrides  # noqa: E402
from olmo_trainer.recipes import toy  # noqa: E402
from training import train_all  # noqa: E402


def main() -> int:
    """Train every precision of every recipe with every seed, and write the report."""
    parser, options = _options()
    try:
        if options.render:
            print("wrote", *report.render(options.render, options.out))
            return 0
        cases = [
            Case(recipe=recipe, precision=precision, seed=seed)
            for seed in options.seeds
            for recipe in options.recipes
            for precision in options.precisions
        ]
        shared = {
            recipe: setting(recipe, device=options.device, steps=options.steps, dry=options.dry_run)
            for recipe in options.recipes
        }
        for case in cases:
            apply_overrides(toy(), settings_of(case, shared[case.recipe])).for_world(1)
    except ValueError as error:
        parser.error(str(error))
    command = shlex.join(["python", "apps/trainer/benchmarks/precision", *sys.argv[1:]])
    facts = report.facts_of(command, options.workers, dry=options.dry_run)
    out = options.out or (Path(tempfile.mkdtemp()) if options.dry_run else REPORTS)
    data = report.new_file(out, options.device, dry=options.dry_run)
    runs, paths = [], []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ended = train_all(
            cases,
            shared,
            options.runs or scratch,
            keep=options.runs is not None,
            workers=options.workers,
            threads=max(1, (os.cpu_count() or 1) // options.workers),
        )
        for run in stack.enter_context(closing(ended)):
            runs.append(run)
            said = run.failure or (
                f"loss {last_tenth(run.losses):.4f}, gradient norm {last_tenth(run.norms):.3f} "
                f"over the last tenth of {len(run.losses)} steps; held-out {run.heldout:.4f}"
            )
            print(f"{run.case.name}: {said}", flush=True)
            # In the order of the cases, whichever ended first.
            runs.sort(key=lambda each: cases.index(each.case))
            paths = report.write(data, runs, facts, shared)
    print("wrote", *paths)
    return int(any(run.failure for run in runs))


def _options() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    known = "; ".join(f"{name}: {words}" for name, (words, _) in PRECISIONS.items())
    parser = argparse.ArgumentParser(prog="precision", description=__doc__)
    parser.add_argument("--recipes", type=_words(RECIPES), default="toy,mid", help="toy, mid")
    parser.add_argument(
        "--precisions",
        type=_words(PRECISIONS),
        default=DEFAULT_PRECISIONS,
        help=f"default {DEFAULT_PRECISIONS}; {known}",
    )
    parser.add_argument("--seeds", type=_seeds, default="0,1,2", help="default 0,1,2")
    parser.add_argument("--steps", type=int, help="of every run; default: 1000")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side; default 2")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the report; default: reports/, for --render that of its first file",
    )
    parser.add_argument("--runs", type=Path, help="keep the runs' folders here; default: none")
    parser.add_argument(
        "--render", type=Path, nargs="+", metavar="JSON", help="of earlier calls: write the report"
    )
    parser.add_argument("--dry-run", action="store_true", help="a few steps of tiny models")
    options = parser.parse_args()
    if options.workers < 1:
        parser.error(f"--workers must be at least 1, got {options.workers}")
    others = [word for word in sys.argv[1:] if word.startswith("--")]
    others = [word for word in others if not word.startswith(("--ren", "--o"))]
    if options.render and others:
        parser.error(f"--render trains nothing and takes --out alone, got {' '.join(others)}")
    return parser, options


def _words(known: Iterable[str]) -> Callable[[str], list[str]]:
    def parse(given: str) -> list[str]:
        words = list(dict.fromkeys(given.split(",")))
        wrong = [word for word in words if word not in known]
        if wrong:
            raise argparse.ArgumentTypeError(
                f"must be some of {', '.join(known)}, got {', '.join(map(repr, wrong))}"
            )
        return words

    return parse


def _seeds(given: str) -> list[int]:
    try:
        return [int(seed) for seed in dict.fromkeys(given.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers as 0,1,2, got {given!r}") from None


if __name__ == "__main__":
    sys.exit(main())
