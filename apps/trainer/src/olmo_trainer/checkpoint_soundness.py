"""Whether every byte of a checkpoint is as it was written, by its checksums; and which one is.

Sizes tell a file that is missing or cut short (`read_manifest`), not a bit that turned on the disk.
Loading meets that only in what it reads whole; a run that starts again by itself must not stop
there each time, nor go on from wrong numbers. So all pieces are read once before, shared out over
the ranks.
"""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from olmo_trainer.checkpoint_manifest import (
    CheckpointError,
    Manifest,
    checkpoints_of,
    is_whole,
    read_manifest,
)
from olmo_trainer.checkpoint_storage import TensorReader
from olmo_trainer.mesh import Mesh
from olmo_trainer.safetensors_file import TensorFile

SET_ASIDE = ".damaged"  # ends the name of a checkpoint that no command takes any more


def check_bytes(path: Path, *, part: int = 0, parts: int = 1) -> None:
    """Read every `parts`-th piece of a checkpoint from piece `part` on.

    Raises:
        ValueError: The index or a piece is not as it was written.
        OSError: A file cannot be read.
    """
    reader = TensorReader(path)
    reader.read_metadata()
    pieces = sorted(
        ((piece.file, piece.key(name), piece) for (name, _), piece in reader.pieces.items()),
        key=lambda each: each[:2],
    )
    for name, mine in groupby(pieces[part::parts], key=lambda each: each[0]):
        with TensorFile(path / name) as file:
            for _, key, piece in mine:
                file.read(key, 0, piece.length, checksum=piece.crc32)


def newest_sound(mesh: Mesh, newest: Manifest, *, say: Callable[[str], None]) -> Manifest:
    """Return the newest checkpoint of a run whose bytes are all as they were written.

    Newer ones that are not are set aside under another name: nothing is deleted, and no later
    command takes them for whole. Collective over the world.

    Args:
        mesh: Who reads.
        newest: Where to begin, the same on every rank.
        say: Told of each checkpoint that is left, why, and what it is called now.

    Raises:
        CheckpointError: On every rank alike: no checkpoint of the run is sound, and none is
            renamed; or one cannot be renamed.
    """
    damaged: dict[Path, str] = {}
    sound = _check(mesh, newest.path, damaged)
    if sound is None:
        older = [
            path.name
            for step, path in checkpoints_of(newest.path.parent.parent)
            if step < newest.step and is_whole(path)
        ]
        for name in mesh.broadcast_text("\n".join(older)).splitlines():
            sound = _check(mesh, newest.path.with_name(name), damaged)
            if sound is not None:
                break
    if sound is None:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in damaged.items())
        raise CheckpointError(f"no checkpoint is as it was written, and none is left: {reasons}")
    for path, reason in damaged.items():
        aside = _name_aside(path)
        say(
            f"DAMAGED: {path}: {reason}. Nothing is deleted: it is {aside.name} from now on. Going "
            f"on from {sound.path.name}"
        )
        try:
            mesh.together(lambda path=path, aside=aside: _rename(mesh, path, aside))
        except RuntimeError as error:
            raise CheckpointError(f"{path}: damaged, and cannot be set aside: {error}") from None
    return sound


def _check(mesh: Mesh, path: Path, damaged: dict[Path, str]) -> Manifest | None:
    """Return what a checkpoint says of itself if it is sound; else add why not to `damaged`."""
    found: list[Manifest] = []

    def check() -> None:
        found.append(read_manifest(path))
        check_bytes(path, part=mesh.rank, parts=mesh.world)

    try:
        mesh.together(check)
    except RuntimeError as error:
        damaged[path] = str(error)
        return None
    return found[0]


def _name_aside(path: Path) -> Path:
    """Return a name that is free."""
    aside, taken = path.with_name(path.name + SET_ASIDE), 1
    while aside.exists():
        taken += 1
        aside = path.with_name(f"{path.name}{SET_ASIDE}-{taken}")
    return aside


def _rename(mesh: Mesh, path: Path, aside: Path) -> None:
    if mesh.is_main:
        path.rename(aside)
