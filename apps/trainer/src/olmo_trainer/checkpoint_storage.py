"""torch.distributed.checkpoint's storage without its pickle: safetensors files and a JSON index.

torch plans who writes which range and who reads which (replicas once, any layout from any other);
this module is where the ranges go to and come from. In a checkpoint's folder:

    tensors-00003.safetensors   the ranges that rank 3 wrote
    tensors.json                {"main.head.weight": {"dtype": "F32", "shape": [8224], "pieces":
                                  [{"file": "tensors-00000.safetensors", "start": 0,
                                    "length": 4112, "crc32": 123}, ...]}, ...}

Tensors are flat (`olmo_distopt.FlatShard`) or of one element without a shape. In a file a piece is
named as its tensor, with `@START` when it does not start it. torch's own writer keeps its index as
a pickle, which whoever loads it executes.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from olmo_trainer.checkpoint_manifest import CheckpointError
from olmo_trainer.safetensors_file import DTYPES, TensorFile, dtype_word, write_tensors

INDEX = "tensors.json"
MOMENTS = ("exp_avg.", "exp_avg_sq.", "momentum.")
"""What the names of an optimizer's moments begin with. They alone may be loaded into another dtype
than they were saved in, which a run may choose anew."""
_FILE = re.compile(r"tensors-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a flat tensor and where it lies."""

    file: str
    start: int
    length: int
    crc32: int

    def key(self, name: str) -> str:
        """Return what the range of tensor `name` is called in its file."""
        return f"{name}@{self.start}" if self.start else name


class TensorWriter(StorageWriter):
    """Writes this rank's ranges of a checkpoint into `folder`; once.

    After the save the main rank has written the index too, and knows the size of each file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.elements: dict[str, int] = {}  # on the main rank, after the save
        self.files: dict[str, int] = {}  # likewise: bytes

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing outlives a save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """No other place is ever named."""
        return False

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what is no flat tensor."""
        for item in plan.items:
            data = item.tensor_data
            if item.type == WriteItemType.BYTE_IO or data is None or len(data.size) > 1:
                raise ValueError(f"a checkpoint holds flat tensors, got {item.index.fqn}")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its file."""
        return [
            replace(plan, storage_data=f"tensors-{rank:05d}.safetensors")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, durably; a rank that has nothing to write makes none."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan.storage_data, plan.items, planner) if plan.items else [])
        return done

    def _write(self, file: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        pieces = []
        for item in items:
            assert item.tensor_data is not None, "checked with the local plan"
            chunk = item.tensor_data.chunk
            start = chunk.offsets[0] if chunk.offsets else 0
            pieces.append(Piece(file, start, math.prod(chunk.sizes), 0))
        shapes = {
            piece.key(item.index.fqn): _form(item)
            for piece, item in zip(pieces, items, strict=True)
        }
        path = self._folder / file
        checksums = write_tensors(path, shapes, (planner.resolve_data(item) for item in items))
        size = path.stat().st_size
        return [
            WriteResult(
                index=item.index,
                size_in_bytes=size,  # of the file: what the main rank wants to know
                storage_data=replace(piece, crc32=checksum),
            )
            for item, piece, checksum in zip(items, pieces, checksums, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index; the main rank alone."""
        pieces: dict[str, list[Piece]] = {name: [] for name in metadata.state_dict_metadata}
        for result in (each for of_rank in results for each in of_rank):
            pieces[result.index.fqn].append(result.storage_data)
            self.files[result.storage_data.file] = result.size_in_bytes
        index = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), "checked with the local plan"
            self.elements[name] = math.prod(tensor.size)
            index[name] = {
                "dtype": dtype_word(tensor.properties.dtype),
                "shape": list(tensor.size),
                "pieces": [
                    {"file": p.file, "start": p.start, "length": p.length, "crc32": p.crc32}
                    for p in sorted(pieces[name], key=lambda piece: piece.start)
                ],
            }
        path = self._folder / INDEX
        path.write_text(json.dumps(index))
        self.files[INDEX] = path.stat().st_size


class TensorReader(StorageReader):
    """Reads any rank's ranges of the checkpoint in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.pieces: dict[
            tuple[str, int], Piece
        ] = {}  # by tensor and start, once the index is read

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing outlives a load."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """No other place is ever named."""
        return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the index says.

        Raises:
            CheckpointError: It cannot be read, names another file than a checkpoint's own, or has
                a tensor whose pieces do not make the whole.
        """
        path = self._folder / INDEX
        tensors: dict[str, Any] = {}
        try:
            raw: dict[str, Any] = json.loads(path.read_text())
            for name, entry in raw.items():
                shape = torch.Size(entry["shape"])
                pieces = [Piece(**piece) for piece in entry["pieces"]]
                _check_pieces(name, math.prod(shape), pieces)
                self.pieces |= {(name, piece.start): piece for piece in pieces}
                tensors[name] = TensorStorageMetadata(
                    properties=TensorProperties(dtype=DTYPES[entry["dtype"]]),
                    size=shape,
                    chunks=[_chunk(piece, shape) for piece in pieces],
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from None
        return Metadata(state_dict_metadata=tensors, storage_meta=StorageMeta())

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """`read_metadata` has kept what is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's ranges; each file is opened once."""
        by_file: dict[str, list[tuple[ReadItem, Piece]]] = {}
        for item in plan.items:
            index = item.storage_index
            piece = self.pieces[index.fqn, index.offset[0] if index.offset else 0]
            by_file.setdefault(piece.file, []).append((item, piece))
        for name, items in by_file.items():
            with TensorFile(self._folder / name) as file:
                for item, piece in items:
                    start = item.storage_offsets[0] if item.storage_offsets else 0
                    read = file.read(
                        piece.key(item.storage_index.fqn),
                        start,
                        math.prod(item.lengths),
                        checksum=piece.crc32,
                    )
                    target = planner.resolve_tensor(item).detach()
                    tensor = item.storage_index.fqn
                    if target.dtype != read.dtype and not tensor.startswith(MOMENTS):
                        raise ValueError(f"{tensor} is {read.dtype} there, {target.dtype} here")
                    target.copy_(read.view(target.shape))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _form(item: WriteItem) -> tuple[torch.dtype, tuple[int, ...]]:
    assert item.tensor_data is not None, "checked with the local plan"
    return item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)


def _chunk(piece: Piece, shape: torch.Size) -> ChunkStorageMetadata:
    if not shape:
        return ChunkStorageMetadata(torch.Size(()), torch.Size(()))
    return ChunkStorageMetadata(torch.Size((piece.start,)), torch.Size((piece.length,)))


def _check_pieces(name: str, numel: int, pieces: list[Piece]) -> None:
    """Raise unless the pieces, in order, are the whole tensor, in files of a checkpoint."""
    for start, piece in zip(_ends(pieces), pieces, strict=False):
        if piece.start != start or piece.length < 0:
            raise ValueError(f"the pieces of {name} leave a gap or overlap at element {start}")
        if not _FILE.fullmatch(piece.file):
            raise ValueError(
                f"{name} must lie in a file tensors-00000.safetensors, got {piece.file}"
            )
    if sum(piece.length for piece in pieces) != numel:
        raise ValueError(f"the pieces of {name} are not its {numel} elements")


def _ends(pieces: list[Piece]) -> Iterator[int]:
    end = 0
    for piece in pieces:
        yield end
        end = piece.start + piece.length
