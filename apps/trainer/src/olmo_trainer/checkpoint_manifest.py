"""Checkpoints: FP32 main weights and moments in global coordinates, complete or not there at all.

A checkpoint is a folder `step-00000400`: tensors in safetensors files, where they lie
(`tensors.json`) and what they are (`checkpoint.json`); nothing in it can be executed. It is written
under a temporary name and renamed when everything is durable, and loses its name before it is
deleted, so a folder of the final name is always whole. Tensors are flat ranges of the global tensor
(`olmo_distopt.FlatShard`): any layout loads any other's. BF16 and MXFP8 copies are rebuilt, never
saved.

    step-00000400.partial   being written
    step-00000400.replaced  set aside while a new one takes its name
    step-00000400.deleted   being deleted

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

FORMAT = 2
MANIFEST = "checkpoint.json"
CHECKPOINTS = "checkpoints"  # in a run's folder
_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
_PICKLES = (".metadata", ".distcp", ".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt")


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
    """Return `path` when it is a checkpoint, or the newest whole one of the run folder `path`.

    Raises:
        CheckpointError: Neither.
    """
    path = path.expanduser()
    if (path / MANIFEST).is_file():
        return path
    damaged: list[str] = []
    for _, folder in checkpoints_of(path):
        try:
            return read_manifest(folder).path
        except CheckpointError as error:
            damaged.append(str(error))
    if damaged:
        raise CheckpointError(f"{path}: no whole checkpoint here: {'; '.join(damaged)}")
    if path.name.startswith("step-") and path.is_dir():
        raise CheckpointError(f"{path}: not a whole checkpoint: {MANIFEST} is missing")
    raise CheckpointError(
        f"{path}: no checkpoint here; give a run's folder or one of its checkpoints/step-* folders"
    )


def newest_manifest(folder: str | None) -> Manifest | None:
    """Return the newest whole checkpoint of a run that may not have begun; `None` without one.

    Raises:
        CheckpointError: No folder is named, or all checkpoints in it are damaged.
    """
    if folder is None:
        raise CheckpointError(
            "--continue needs the run's folder, the same each time: --set run.folder=FOLDER"
        )
    run = Path(folder).expanduser()
    return read_manifest(find_checkpoint(run)) if checkpoints_of(run) else None


def checkpoints_of(run: Path) -> list[tuple[int, Path]]:
    """Return step and folder of a run's checkpoints, newest first, whether whole or damaged.

    One that was set aside counts, until a new one has its name.
    """
    found: dict[int, Path] = {}
    for folder in sorted((run / CHECKPOINTS).glob("step-*")):  # a name, then the name set aside
        if name := _NAME.fullmatch(folder.name):
            found.setdefault(int(name.group(1)), folder)
    return sorted(found.items(), reverse=True)


def newest_step(run: Path) -> int:
    """Return the step of the newest whole checkpoint in a run folder, -1 without one."""
    return next((step for step, folder in checkpoints_of(run) if is_whole(folder)), -1)


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
        CheckpointError: The description cannot be read, a file is missing or cut short, or a
            pickle lies beside the files it names.
    """
    try:
        raw: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        if raw["format"] != FORMAT:
            why = ", whose index is a pickle that loading would execute" * (raw["format"] == 1)
            raise CheckpointError(
                f"{path}: format {raw['format']}{why} is not the one this version reads ({FORMAT})"
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
    except (
        OSError,
        UnicodeDecodeError,
        json.JSONDecodeError,
        KeyError,
        TypeError,
        ConfigError,
    ) as error:
        raise CheckpointError(
            f"{path / MANIFEST}: cannot be read: {type(error).__name__}: {error}"
        ) from None
    for file in sorted(path.iterdir()):
        if file.name not in manifest.files and file.name.endswith(_PICKLES):
            raise CheckpointError(
                f"{path}: {file.name} is none of its files and may be a pickle, which runs what it "
                "holds when it is loaded; nothing here reads it: find out who put it there, and "
                "remove it"
            )
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
    for ending in ("partial", "deleted"):
        for leftover in (run / CHECKPOINTS).glob(f"*.{ending}"):
            shutil.rmtree(leftover)
    for aside in (run / CHECKPOINTS).glob("*.replaced"):
        if aside.with_suffix("").exists():
            shutil.rmtree(aside)
        else:
            aside.rename(aside.with_suffix(""))


def delete_expired(run: Path, *, keep_last: int, keep_every: int) -> list[int]:
    """Delete a run's checkpoints but those to keep; return the steps deleted, oldest first.

    Call it when a new one is durable. A checkpoint loses its name before its files.

    Args:
        run: The run's folder.
        keep_last: How many of the newest whole ones to keep; 0 keeps all.
        keep_every: Steps that are a multiple of it are kept too; 0 = none. Step 0, where an import
            lies, is a multiple.
    """
    if not keep_last:
        return []
    deleted, whole = [], 0
    for step, folder in checkpoints_of(run):
        if whole < keep_last:
            whole += is_whole(folder)  # what is damaged keeps nobody else from being kept
        elif not (keep_every and step % keep_every == 0):
            doomed = folder.with_name(f"step-{step:08d}.deleted")
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            deleted.append(step)
    return deleted[::-1]


def is_whole(path: Path) -> bool:
    """Whether `read_manifest` would take it."""
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def _differs(manifest: Manifest, key: str, old: object, new: object) -> CheckpointError:
    return CheckpointError(
        f"{manifest.path}: a checkpoint of another model: {key} is {old!r} there and {new!r} here"
    )
