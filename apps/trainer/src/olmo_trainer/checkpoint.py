"""Saving and loading the tensors of a checkpoint through torch.distributed.checkpoint.

Every rank contributes the ranges it holds and reads the ranges it needs; names and global offsets
are all that matters, so the layouts that saved and load may differ. `checkpoint_storage.py` is what
the ranges go to. A save talks over a group of its own, so that it may run beside training
(`checkpoint_saver.py`).
"""

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from olmo_distopt import FlatShard
from olmo_routing import SelectionBias
from torch.distributed.checkpoint.api import CheckpointException

from olmo_trainer.build import Assembly
from olmo_trainer.checkpoint_manifest import (
    CheckpointError,
    Manifest,
    checkpoint_path,
    checkpoints_of,
    is_whole,
    write_manifest,
)
from olmo_trainer.checkpoint_storage import TensorReader, TensorWriter
from olmo_trainer.config import TrainerConfig
from olmo_trainer.guard import PREFIX as GUARD
from olmo_trainer.guard import Guard
from olmo_trainer.mesh import Mesh
from olmo_trainer.model.transformer import Transformer
from olmo_trainer.rerun import PREFIX as RERUN
from olmo_trainer.rerun import StepRerun


class SaveError(RuntimeError):
    """A checkpoint could not be written; those before it stand."""


def state_of(assembly: Assembly) -> dict[str, Any]:
    """Return the live state by global name; no copies.

    Of the optimizer, the selection biases, the guard and the reruns.
    """
    state = {**assembly.optimizer.state_dict(), **bias_shards(assembly.selection_biases)}
    for part in _memories(assembly):
        state |= part.state_dict()
    return state


def bias_shards(biases: Mapping[int, SelectionBias]) -> dict[str, Any]:
    """Return the selection biases as a checkpoint holds them, by global layer index; no copies."""
    return {f"selection_bias.{layer}": FlatShard(bias.bias_E) for layer, bias in biases.items()}


def save_checkpoint(
    assembly: Assembly, run: Path, step: int, *, data_fingerprint: str, versions: dict[str, str]
) -> Path:
    """Write the checkpoint of `step` and return its folder. Collective over the world.

    Raises:
        SaveError: As `write_checkpoint`.
    """
    return write_checkpoint(
        state_of(assembly),
        assembly.config,
        assembly.mesh,
        checkpoint_path(run, step),
        step=step,
        data_fingerprint=data_fingerprint,
        versions=versions,
    )


def write_checkpoint(
    state: dict[str, Any],
    config: TrainerConfig,
    mesh: Mesh,
    final: Path,
    *,
    step: int,
    data_fingerprint: str,
    versions: dict[str, str],
) -> Path:
    """Write `state`, this rank's part of the whole, into the folder `final` and return it.

    Collective over the world, in any one thread. The folder gets its name when everything in it is
    durable.

    Raises:
        SaveError: A rank could not write; on every rank alike. What was there before stands.
    """
    partial = final.with_name(final.name + ".partial")
    writer = TensorWriter(partial)

    def begin() -> None:
        if mesh.is_main:
            # What failed before, of whatever step, may be what fills the disk.
            for leftover in final.parent.glob("*.partial"):
                shutil.rmtree(leftover)
            partial.mkdir(parents=True)

    def commit() -> None:
        if not mesh.is_main:
            return
        manifest = Manifest(
            path=partial,
            step=step,
            config=config,
            data_fingerprint=data_fingerprint,
            elements=writer.elements,
            files=dict(sorted(writer.files.items())),
            versions=versions,
        )
        write_manifest(partial, manifest)
        _make_durable(partial)
        _replace(partial, final)

    try:
        mesh.together(begin)
        with _quiet_alone():
            dcp.save(
                state,
                storage_writer=writer,
                process_group=mesh.checkpoint_group,
                no_dist=mesh.checkpoint_group is None,
            )
        mesh.together(commit)
    except CheckpointException as error:
        raise SaveError(f"{final}: not saved: {_reasons(error)}") from error
    except RuntimeError as error:  # of `together`, or of a group whose other end is gone
        raise SaveError(f"{final}: not saved: {error}") from error
    return final


def load_checkpoint(assembly: Assembly, manifest: Manifest) -> None:
    """Load a checkpoint of any layout into this one. Collective over the world.

    Raises:
        CheckpointError: A tensor is missing, extra, or of another shape; on every rank alike.
    """
    expected = _gather_elements(assembly.mesh, state_of(assembly))
    # A guard or reruns may come or go, or a guard change its window: it starts without memories.
    memories: dict[str, Any] = {}
    for part in _memories(assembly):
        found = part.state_dict()
        if all(manifest.elements.get(name) == tensor.numel() for name, tensor in found.items()):
            memories |= found
    names = expected.keys() | manifest.elements.keys()
    for name in sorted(name for name in names if not name.startswith((GUARD, RERUN))):
        here, there = expected.get(name), manifest.elements.get(name)
        if here != there:
            raise CheckpointError(
                f"{manifest.path}: tensor {name} has {_elements(there)} there and "
                f"{_elements(here)} here"
            )
    biases = bias_shards(assembly.selection_biases)
    state = {**assembly.optimizer.start_loading(), **biases, **memories}
    _read(state, manifest, alone=assembly.mesh.world_group is None)
    assembly.optimizer.finish_loading()
    if assembly.rerun is not None:
        assembly.rerun.finish_loading()


def load_model_state(model: Transformer, manifest: Manifest) -> None:
    """Load weights and selection biases into a whole FP32 model, in this process alone."""
    state: dict[str, Any] = {
        f"main.{name}": FlatShard(parameter.data) for name, parameter in model.named_parameters()
    }
    state |= bias_shards(model.selection_biases)
    _read(state, manifest, alone=True)


def _read(state: dict[str, Any], manifest: Manifest, *, alone: bool) -> None:
    try:
        with _quiet_alone():
            dcp.load(state, storage_reader=TensorReader(manifest.path), no_dist=alone)
    except CheckpointException as error:
        raise CheckpointError(
            f"{manifest.path}: damaged: its tensors cannot be read ({_reasons(error)}); "
            f"{_older(manifest)}"
        ) from error


def _older(manifest: Manifest) -> str:
    """Return what to do without this checkpoint."""
    run = manifest.run
    for step, path in [] if run is None else checkpoints_of(run):
        if step < manifest.step and is_whole(path):
            return (
                f"use an older checkpoint: {path}, in a run of its own with --set "
                f"run.folder=ANOTHER, or go on here with --continue --set run.folder={run}, which "
                "takes the newest that is as it was written"
            )
    return "use an older checkpoint; there is none beside it"


def _reasons(error: CheckpointException) -> str:
    """Return what each rank that failed has to say, in one line."""
    words = []
    for rank, (failure, _) in sorted(error.failures.items()):
        first = (str(failure).splitlines() or [""])[0]
        words.append(f"rank {rank}: {type(failure).__name__}: {first}")
    return "; ".join(words)


@contextmanager
def _quiet_alone() -> Iterator[None]:
    """Keep torch from warning that a run of one process saves in one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _gather_elements(mesh: Mesh, state: dict[str, Any]) -> dict[str, int]:
    """Return the number of elements of every global tensor of the whole state, on every rank."""
    elements = {name: tensor.numel() for name, tensor in state.items()}
    if mesh.world_group is None:
        return elements
    gathered: list[Any] = [None] * mesh.world
    dist.all_gather_object(gathered, elements)
    return {name: count for each in gathered for name, count in each.items()}


def _memories(assembly: Assembly) -> list[Guard | StepRerun]:
    return [part for part in (assembly.guard, assembly.rerun) if part is not None]


def _elements(count: int | None) -> str:
    return "none" if count is None else f"{count} elements"


def _replace(partial: Path, final: Path) -> None:
    """Give a whole checkpoint its name; an older one of that name is deleted last."""
    aside = final.with_name(final.name + ".replaced")
    if final.exists():
        final.rename(aside)
    partial.rename(final)
    _sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _make_durable(folder: Path) -> None:
    for file in folder.iterdir():
        _sync(file)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
