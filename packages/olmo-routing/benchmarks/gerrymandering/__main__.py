"""Train a small mixture-of-experts language model under honest and gamed balance losses.

python packages/olmo-routing/benchmarks/gerrymandering [--large --device cuda] [--steps N]
"""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "src")]

import report  # noqa: E402
from model import Sizes  # noqa: E402
from text import Text  # noqa: E402
from training import Arm, Recipe, Run, train  # noqa: E402

_COEFFICIENTS = ("30", "3", "0.1", "0.01")
_ARMS = ",".join(f"{loss}:{c}" for loss in ("ordinary", "margin") for c in _COEFFICIENTS)
_SMALL = Sizes()
_LARGE = Sizes(layers=4, width=256, heads=8, experts=32, top_k=4, hidden=64, length=256)
_TINY = Sizes(layers=1, width=16, heads=2, experts=8, top_k=2, hidden=4, length=16)


def main() -> int:
    """Run all arms with all seeds, print the table and write the report."""
    options = _options()
    if options.render:
        print("wrote", *report.render(options.render))
        return 0
    arms, recipe = _arms(options), _recipe(options)
    seeds = range(1 if options.dry_run else options.seeds)
    text = Text()
    jobs = [(arm, seed) for seed in seeds for arm in arms]
    runs = []
    for run in _trained(jobs, recipe, text, options.workers):
        last = run.points[-1]
        print(
            f"{run.arm.name}, seed {run.seed}: language loss {last.language_loss:.3f}, "
            f"E f.P {last.ordinary_loss:.4f}, worst load {last.worst_load:.2f}, "
            f"first alarm {run.first_alarm}",
            flush=True,
        )
        runs.append(run)
    program = "packages/olmo-routing/benchmarks/gerrymandering"
    command = shlex.join(["python", program, *sys.argv[1:]])
    paths = report.write(options.out, runs, recipe, text.describe(), command, options.dry_run)
    print(*report.table(runs), sep="\n")
    print("wrote", *paths)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gerrymandering", description=__doc__)
    parser.add_argument("--steps", type=int, help="optimizer steps of a run; 600, large 2000")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--large", action="store_true", help="the model for a GPU")
    parser.add_argument("--seeds", type=int, default=2, help="runs an arm")
    parser.add_argument("--arms", default=_ARMS, help="LOSS:COEFFICIENT,...; ordinary or margin")
    parser.add_argument("--scope", choices=("sequence", "batch"), default="sequence")
    parser.add_argument("--learning-rate", type=float, help="of AdamW")
    parser.add_argument(
        "--no-renormalize", action="store_true", help="combine weights that follow the scores"
    )
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument(
        "--out", type=Path, default=HERE.parent / "reports", help="folder of the report"
    )
    parser.add_argument(
        "--render", type=Path, help="a JSON file of an earlier run: write its report and plot again"
    )
    parser.add_argument("--dry-run", action="store_true", help="a few steps of a tiny model")
    options = parser.parse_args()
    for name in ("seeds", "workers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    return options


def _arms(options: argparse.Namespace) -> list[Arm]:
    arms = []
    for given in options.arms.split(","):
        loss, _, coefficient = given.partition(":")
        if loss not in ("ordinary", "margin") or not coefficient:
            raise SystemExit(f"--arms takes ordinary:NUMBER or margin:NUMBER, got {given!r}")
        arms.append(Arm(loss=loss, coefficient=float(coefficient)))
    return arms


def _recipe(options: argparse.Namespace) -> Recipe:
    tiny, small, large = (
        dataclasses.replace(sizes, renormalize=not options.no_renormalize)
        for sizes in (_TINY, _SMALL, _LARGE)
    )
    shared = {"per_sequence": options.scope == "sequence", "device": options.device}
    if options.dry_run:
        return Recipe(
            sizes=tiny, steps=6, batch=4, learning_rate=0.01, held_out_sequences=4, **shared
        )
    if options.large:
        rate = options.learning_rate or 2e-3
        return Recipe(
            sizes=large, steps=options.steps or 2000, batch=32, learning_rate=rate, **shared
        )
    rate = options.learning_rate or 1e-2
    return Recipe(sizes=small, steps=options.steps or 600, batch=8, learning_rate=rate, **shared)


def _trained(
    jobs: list[tuple[Arm, int]], recipe: Recipe, text: Text, workers: int
) -> Iterator[Run]:
    """Train in processes of one thread each, which is fastest for a model this small."""
    if min(workers, len(jobs)) == 1 or recipe.steps < 10:
        yield from (train(arm, seed, recipe, text) for arm, seed in jobs)
        return
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        waiting = [pool.submit(train, arm, seed, recipe, text) for arm, seed in jobs]
        yield from (run.result() for run in waiting)


if __name__ == "__main__":
    sys.exit(main())
