"""Tensors in safetensors files: one, or several with an index, as Hugging Face lays them out."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from olmo_trainer.extras import install_command

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9


def require_safetensors() -> ModuleType:
    """Return the `safetensors` package.

    Raises:
        ValueError: It is not installed.
    """
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise ValueError(
            "checkpoints of Hugging Face need the package safetensors; install it with "
            f"{install_command('hugging-face')}"
        ) from None
    return safetensors


class TensorFolder(Mapping[str, Tensor]):
    """The tensors of a folder by name, each read when it is asked for.

    Raises:
        ValueError: The folder holds no safetensors, or its index names a file that is not there.
    """

    def __init__(self, folder: Path) -> None:
        safetensors = require_safetensors()
        index = folder / INDEX
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            names = [SINGLE]
        self._files: dict[str, Any] = {}
        for name in names:
            path = folder / name
            if not path.is_file():
                raise ValueError(f"{path}: no such file; a checkpoint in safetensors has it")
            try:
                file = safetensors.safe_open(path, framework="pt")
            except safetensors.SafetensorError as error:
                raise ValueError(f"{path}: damaged: {error}") from None
            self._files |= dict.fromkeys(file.keys(), file)

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def write_tensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write tensors into an empty folder, each file at most `shard_bytes` (or one tensor) long.

    Views are copied, at most one file's worth at a time.
    """
    save = require_safetensors().torch.save_file
    places: dict[str, int] = {}
    shard: dict[str, Tensor] = {}
    num_shards, held, total = 0, 0, 0

    def part(number: int) -> Path:
        return folder / f"{number}.partial"

    def flush() -> None:
        nonlocal num_shards, held
        save(shard, part(num_shards), metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, num_shards))
        shard.clear()
        num_shards, held = num_shards + 1, 0

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > shard_bytes:
            flush()
        shard[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        held, total = held + size, total + size
    flush()
    if num_shards == 1:
        part(0).rename(folder / SINGLE)
        return
    # The number of files is part of their names, and known only now.
    files = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    for number, file in enumerate(files):
        part(number).rename(folder / file)
    weight_map = {name: files[number] for name, number in places.items()}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1))
