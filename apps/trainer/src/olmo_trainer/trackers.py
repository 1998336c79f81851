"""The records of a run, sent on to TensorBoard or Weights & Biases; `metrics.jsonl` is the truth.

A tracker takes what the log takes. It may fail, as a network does, without harm to the run: the
first failure is said and ends the tracking, not the training. Both packages are extras.

A resumed run lives steps again: TensorBoard drops what it had of them, Weights & Biases keeps the
run under one id, with the step as an axis of its own, so that the later value stands last.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from olmo_trainer.extras import install_command
from olmo_trainer.metrics import HeldoutRecord, RanksRecord, Record, RunHeader

Kind = Literal["tensorboard", "wandb"]
_PACKAGES: Mapping[Kind, str] = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


class Tracker(Protocol):
    """Takes numbers by name."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a step."""

    def close(self) -> None:
        """Send what is left."""


def require_trackers(kinds: Sequence[Kind]) -> None:
    """Raise `ValueError`, naming the extra to install, unless each tracker's package is there."""
    for kind in kinds:
        try:
            import_module(_PACKAGES[kind])
        except ImportError as error:
            raise ValueError(
                f"run.trackers = {kind!r} needs the package {kind} ({error}); install it with "
                f"{install_command(kind)}"
            ) from None


def numbers_of(record: Record) -> Iterator[tuple[str, float]]:
    """Yield every number of a record under a name; lists of layers and ranks are numbered.

    Routes of each expert stay in the log: a curve an expert and layer is more than a page can show.
    """
    if isinstance(record, RunHeader):
        return
    group = {HeldoutRecord: "heldout", RanksRecord: "ranks"}.get(type(record), "train")
    for entry in fields(record):
        if entry.name not in ("step", "expert_counts"):
            yield from _flatten(f"{group}/{entry.name}", getattr(record, entry.name))


def _flatten(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _flatten(f"{name}/{key}", entry)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _flatten(f"{name}/{index}", entry)
    elif value is not None:
        yield name, value


class TensorBoardTracker:
    """Writes event files into `folder`/tensorboard."""

    def __init__(self, folder: Path, first_step: int) -> None:
        module = import_module(_PACKAGES["tensorboard"])
        self._writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add a scalar a number."""
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        """Flush the file."""
        self._writer.close()


class WandbTracker:
    """Sends to Weights & Biases, as the environment says (`WANDB_PROJECT`, `WANDB_MODE`, ...)."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        module = import_module(_PACKAGES["wandb"])
        # The run of this folder, whichever process goes on with it.
        digest = hashlib.blake2b(str(folder.absolute()).encode(), digest_size=6).hexdigest()
        self._run = module.init(
            id=f"{re.sub('[^A-Za-z0-9_-]', '-', name)}-{digest}",
            name=name,
            config=dict(config),
            dir=str(folder),
            resume="allow",
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers with their step."""
        self._run.log({"step": step, **numbers})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class Tracking:
    """A run's trackers together; opened by the main rank alone.

    Args:
        kinds: Which.
        folder: The run's folder.
        name: Of the run.
        config: The whole configuration.
        first_step: Steps done when the process begins.
        say: Takes a line for a person.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        folder: Path,
        *,
        name: str,
        config: Mapping[str, Any],
        first_step: int,
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._trackers: dict[Kind, Tracker] = {}
        make: Mapping[Kind, Callable[[], Tracker]] = {
            "tensorboard": lambda: TensorBoardTracker(folder, first_step),
            "wandb": lambda: WandbTracker(folder, name, config),
        }
        for kind in kinds:
            self._attempt(kind, lambda kind=kind: self._trackers.update({kind: make[kind]()}))

    def write(self, record: Record) -> None:
        """Send a record's numbers to each tracker."""
        numbers = dict(numbers_of(record)) if self._trackers else {}
        if numbers:
            for kind, tracker in list(self._trackers.items()):
                self._attempt(kind, lambda tracker=tracker: tracker.write(record.step, numbers))

    def close(self) -> None:
        """Send what is left."""
        for kind, tracker in list(self._trackers.items()):
            self._attempt(kind, tracker.close)
        self._trackers.clear()

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attempt(self, kind: Kind, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._trackers.pop(kind, None)
            self._say(f"{kind} is given up, the run goes on: {type(error).__name__}: {error}")
