"""Checkpoints: FP32 main weights and moments in global coordinates, complete or not there at all.

A checkpoint is a folder `step-00000400`: the tensors as torch.distributed.checkpoint writes them
and `checkpoint.json`, which says what they are. It is written under a temporary name and renamed
when everything is durable, so a folder of the final name is always whole. Tensors are flat ranges
of the global tensor (`olmo_distopt.FlatShard`): any layout loads any other's. BF16 and MXFP8 copies
are rebuilt, never saved.

This module reads and checks `checkpoint.json` without torch; `checkpoint.py` moves tensors.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_trainer.config import ModelConfig, TrainerConfig
from olmo_trainer.overrides import ConfigError, parse_config

FORMAT = 1
MANIFEST = "checkpoint.json"
CHECKPOINTS = "checkpoints"  # in a run's folder
_NAME = re.compile(r"step-(\d{8})")


class CheckpointError(ValueError):
    """A checkpoint that is not there, not whole, or of something else."""


@dataclass(frozen=True)
class Manifest:
    """What `checkpoint.json` says."""

    path: Path
    step: int
    config: TrainerConfig
    data_fingerprint: str
    elements: dict[str, int]
    files: dict[str, int]
    versions: dict[str, str]

    @property
    def run(self) -> Path | None:
        """The run folder this checkpoint lies in; `None` for one that was moved out of a run."""
        path = self.path.absolute()
        return path.parent.parent if path.parent.name == CHECKPOINTS else None


def checkpoint_path(run: Path, step: int) -> Path:
    """Return the folder of step `step` in a run."""
    return run / CHECKPOINTS / f"step-{step:08d}"


def find_checkpoint(path: Path) -> Path:
    """Return `path` when it is a checkpoint, or the newest one of the run folder `path`.

    Raises:
        CheckpointError: Neither.
    """
    path = path.expanduser()
    if (path / MANIFEST).is_file():
        return path
    newest = newest_step(path)
    if newest >= 0:
        return checkpoint_path(path, newest)
    if path.name.startswith("step-") and path.is_dir():
        raise CheckpointError(f"{path}: not a whole checkpoint: {MANIFEST} is missing")
    raise CheckpointError(
        f"{path}: no checkpoint here; give a run's folder or one of its checkpoints/step-* folders"
    )


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint in a run folder, -1 without one."""
    names = [_NAME.fullmatch(each.name) for each in (run / CHECKPOINTS).glob("step-*")]
    return max((int(name.group(1)) for name in names if name), default=-1)


def newest_run(folder: Path) -> Path:
    """Return the newest run folder of a recipe that holds a checkpoint.

    Raises:
        CheckpointError: There is none.
    """
    runs = [path for path in folder.glob("*") if any(path.glob(f"{CHECKPOINTS}/step-*/{MANIFEST}"))]
    if not runs:
        raise CheckpointError(f"{folder}: no run with a checkpoint here; give --resume a path")
    return max(runs, key=lambda path: path.name)


def read_manifest(path: Path) -> Manifest:
    """Read and check a checkpoint's description and its files' sizes.

    Raises:
        CheckpointError: The description cannot be read, or a file is missing or cut short.
    """
    try:
        raw: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        if raw["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: format {raw['format']} is not the one this version reads ({FORMAT})"
            )
        manifest = Manifest(
            path=path,
            step=raw["step"],
            config=parse_config(raw["config"]),
            data_fingerprint=raw["data_fingerprint"],
            elements=raw["elements"],
            files=raw["files"],
            versions=raw["versions"],
        )
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(
            f"{path / MANIFEST}: cannot be read: {type(error).__name__}: {error}"
        ) from None
    for name, size in manifest.files.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(
                f"{path}: truncated: {name} {state}, {size} were written; use an older checkpoint"
            )
    return manifest


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write `checkpoint.json` into `path`."""
    raw = {
        "format": FORMAT,
        "step": manifest.step,
        "config": manifest.config.model_dump(mode="json"),
        "data_fingerprint": manifest.data_fingerprint,
        "elements": manifest.elements,
        "files": manifest.files,
        "versions": manifest.versions,
    }
    (path / MANIFEST).write_text(json.dumps(raw, indent=1))


def check_same_model(manifest: Manifest, model: ModelConfig) -> None:
    """Raise `CheckpointError` naming the first value in which the checkpoint's model differs.

    Loss coefficients and rates may change; what decides names and shapes may not.
    """
    free = {"balance_loss", "balance_scope", "z_loss"}

    def compare(old: dict[str, Any], new: dict[str, Any], prefix: str) -> None:
        for name, value in new.items():
            if isinstance(value, dict):
                compare(old[name], value, f"{prefix}{name}.")
            elif name == "bias_rate":
                if bool(old[name]) != bool(value):
                    raise _differs(manifest, f"{prefix}{name}", old[name], value)
            elif name not in free and old[name] != value:
                raise _differs(manifest, f"{prefix}{name}", old[name], value)

    compare(manifest.config.model.model_dump(), model.model_dump(), "model.")


def check_same_data(manifest: Manifest, fingerprint: str) -> None:
    """Raise `CheckpointError` when the training data is not what the checkpoint's run read.

    At step 0, as after an import, it has read none yet.
    """
    if manifest.step and manifest.data_fingerprint != fingerprint:
        raise CheckpointError(
            f"{manifest.path}: its run trained on other data (fingerprint "
            f"{manifest.data_fingerprint}, now {fingerprint}): the text, data.*, "
            "batch.sequences or seed changed. "
            "Restore them, or start a new run"
        )


def discard_leftovers(run: Path) -> None:
    """Delete what a killed save left behind; give back its name to a checkpoint it had moved."""
    for partial in (run / CHECKPOINTS).glob("*.partial"):
        shutil.rmtree(partial)
    for aside in (run / CHECKPOINTS).glob("*.replaced"):
        if aside.with_suffix("").exists():
            shutil.rmtree(aside)
        else:
            aside.rename(aside.with_suffix(""))


def _differs(manifest: Manifest, key: str, old: object, new: object) -> CheckpointError:
    return CheckpointError(
        f"{manifest.path}: a checkpoint of another model: {key} is {old!r} there and {new!r} here"
    )
