"""The folder a run writes into: its own, and no other run's history is ever overwritten."""

from datetime import datetime
from itertools import count
from pathlib import Path

from olmo_trainer.checkpoint_manifest import Manifest, checkpoints_of, newest_step
from olmo_trainer.config import TrainerConfig
from olmo_trainer.metrics import METRICS

RUNS = Path("runs")
SAMPLE = "sample.txt"  # what the trained model wrote, beside the metrics


def prepare_folder(
    config: TrainerConfig, resume: Manifest | None, *, goes_on: bool = False
) -> Path | None:
    """Make the folder that `run.folder` names, or of the run that is resumed; or say why not.

    Every rank may call it, before any process group. With `goes_on` a run that has saved nothing
    yet may start again in its folder.

    Returns:
        The folder; `None` when a new one must be claimed (`claim_folder`).

    Raises:
        ValueError: Another run's folder, a run with later checkpoints, or no place to write.
    """
    own = None if resume is None else resume.run
    folder = own
    if config.run.folder is not None:
        folder = Path(config.run.folder).expanduser()
    if folder is None:
        _make(RUNS / config.name)
        return None
    if own is not None and resume is not None and folder.resolve() == own.resolve():
        latest = newest_step(own)
        if latest > resume.step:
            raise ValueError(
                f"{own} has later checkpoints than step {resume.step}, up to step {latest}; resume "
                "the newest, or branch off with --set run.folder=ANOTHER"
            )
    elif ((folder / METRICS).exists() and not goes_on) or checkpoints_of(folder):
        raise ValueError(
            f"run.folder = {str(folder)!r} already holds a run; continue it with "
            f"--resume {folder}, or choose another folder"
        )
    _make(folder)
    return folder


def claim_folder(name: str) -> Path:
    """Make and return a new folder named after the time; one process calls it."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for attempt in count(1):
        folder = RUNS / name / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue  # another run started in the same second
        return folder
    raise AssertionError("unreachable: `count` does not end")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run.folder = {str(folder)!r}: cannot write there: {error}") from None
