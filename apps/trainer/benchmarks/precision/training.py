"""Runs of the trainer, several side by side, each a process of its own with its own command line.

What comes back is read from the run's own `metrics.jsonl`, and nowhere else.
"""

import shutil
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from cases import Case, settings_of
from olmo_trainer.metrics import METRICS, RunHeader, StepRecord, read_metrics

_TRAINER = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run wrote down.

    Attributes:
        case: What was trained.
        losses: Cross entropy of each step, in nats a token.
        norms: Gradient norm of each step, before clipping.
        heldout: Held-out loss after the last step, in nats a token; NaN where there was none.
        versions: Of Python, torch and the trainer, and the device's name.
        failure: The last words of a run that did not come to its end; empty otherwise.
    """

    case: Case
    losses: list[float]
    norms: list[float]
    heldout: float
    versions: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""


def train_all(
    cases: Sequence[Case],
    shared: Mapping[str, Sequence[str]],
    folder: Path,
    *,
    keep: bool,
    workers: int,
    threads: int,
) -> Generator[Run, None, None]:
    """Train each case in `folder`; yield runs as they end, `workers` at a time.

    Args:
        cases: In the order in which they start.
        shared: What all runs of a recipe share, by recipe.
        folder: Gets a folder for each case.
        keep: Whether these folders stay; with its checkpoint one may have a gigabyte.
        workers: Runs side by side.
        threads: CPU threads of each.
    """
    running: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(workers) as pool:
        waiting = [
            pool.submit(
                _train, case, shared[case.recipe], folder / case.name, keep, threads, running
            )
            for case in cases
        ]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:  # who stops the program stops its runs
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.kill()


def _train(
    case: Case,
    shared: Sequence[str],
    folder: Path,
    keep: bool,
    threads: int,
    running: list[subprocess.Popen[str]],
) -> Run:
    settings = [*settings_of(case, shared), f"run.threads={threads}", f"run.folder={folder}"]
    command = [sys.executable, str(_TRAINER), "train", "toy"]
    for each in settings:
        command += ["--set", each]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        running.append(process)
        said, _ = process.communicate()
    run = read_run(case, folder, said=said, status=process.returncode)
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    return run


def read_run(case: Case, folder: Path, *, said: str, status: int) -> Run:
    """Return what the run in `folder` wrote down.

    Args:
        case: What was trained there.
        folder: Of the run.
        said: What the process printed; its end says why there are fewer steps than asked for.
        status: Its exit status. After the last step it may fail and the run be whole all the same:
            the trainer's own page needs matplotlib, which not every GPU machine has.
    """
    path = folder / METRICS
    records = read_metrics(path) if path.exists() else []
    steps = [each for each in records if isinstance(each, StepRecord)]
    headers = [each for each in records if isinstance(each, RunHeader)]
    asked = headers[0].info["config"]["steps"] if headers else None
    last = steps[-1] if steps else None
    heldout = None if last is None or last.step != asked else last.heldout_loss
    failure = (
        "" if heldout is not None else f"exit status {status}: {' '.join(said.split())[-400:]}"
    )
    return Run(
        case=case,
        losses=[each.loss for each in steps],
        norms=[each.grad_norm for each in steps],
        heldout=float("nan") if heldout is None else heldout,
        versions=headers[0].info["versions"] if headers else {},
        failure=failure,
    )
