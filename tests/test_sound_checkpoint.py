"""Ranks share out the bytes of a checkpoint, and agree on which one is sound."""

import json
import re
from pathlib import Path

import pytest
import torch
from olmo_trainer.build import assemble
from olmo_trainer.checkpoint import save_checkpoint
from olmo_trainer.checkpoint_manifest import CheckpointError, checkpoint_path, read_manifest
from olmo_trainer.checkpoint_soundness import check_bytes, newest_sound
from olmo_trainer.mesh import create_mesh
from olmo_trainer.overrides import apply_overrides
from olmo_trainer.recipes import nano

pytestmark = pytest.mark.dist


def _save(rank: int, world: int, run: str) -> None:
    config = apply_overrides(nano(), ["layout.expert=2"]).for_world(world)
    assembly = assemble(config, create_mesh(config.layout, torch.device("cpu")))
    for step in (1, 2, 3):
        save_checkpoint(assembly, Path(run), step, data_fingerprint="", versions={})


def _turn_a_bit(checkpoint: Path, tensor: str) -> None:
    (piece, *_) = json.loads((checkpoint / "tensors.json").read_text())[tensor]["pieces"]
    file = checkpoint / piece["file"]
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    key = f"{tensor}@{piece['start']}" if piece["start"] else tensor
    content[8 + length + header[key]["data_offsets"][0]] ^= 4
    file.write_bytes(content)


def _fault(checkpoint: Path, part: int) -> str:
    try:
        check_bytes(checkpoint, part=part, parts=2)
    except ValueError as error:
        return str(error)
    return ""


def _search(rank: int, world: int, run: str) -> tuple[str, list[str]]:
    said: list[str] = []
    config = apply_overrides(nano(), ["layout.expert=2"]).for_world(world)
    mesh = create_mesh(config.layout, torch.device("cpu"))
    newest = read_manifest(checkpoint_path(Path(run), 3))
    try:
        return newest_sound(mesh, newest, say=said.append).path.name, said
    except CheckpointError as error:
        return str(error), said


def test_one_rank_that_reads_a_turned_bit_is_enough(processes, tmp_path):
    run = str(tmp_path)
    processes.run(_save, run, world=2)
    newest = checkpoint_path(tmp_path, 3)
    assert processes.run(_search, run, world=2) == [("step-00000003", [])] * 2
    tensors = list(json.loads((newest / "tensors.json").read_text()))
    blind = set()
    for tensor in tensors:
        whole = {file.name: file.read_bytes() for file in newest.iterdir()}
        _turn_a_bit(newest, tensor)
        blind |= {part for part in (0, 1) if not _fault(newest, part)}
        with pytest.raises(ValueError, match=f"{re.escape(tensor)}.*checksum differs"):
            check_bytes(newest)
        for name, content in whole.items():
            (newest / name).write_bytes(content)
    assert blind == {0, 1}  # each rank reads a part alone
    _turn_a_bit(newest, tensors[0])
    _turn_a_bit(checkpoint_path(tmp_path, 2), tensors[-1])
    answers = processes.run(_search, run, world=2)
    assert [name for name, _ in answers] == ["step-00000001"] * 2
    assert len(answers[0][1]) == 2
    _turn_a_bit(checkpoint_path(tmp_path, 1), tensors[3])
    checkpoint_path(tmp_path, 1).rename(newest)
    before = sorted(path.name for path in newest.parent.iterdir())
    for error, said in processes.run(_search, run, world=2):
        assert "no checkpoint is as it was written, and none is left" in error
        assert said == []
    assert sorted(path.name for path in newest.parent.iterdir()) == before
