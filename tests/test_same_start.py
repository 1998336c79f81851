"""Ranks that find other checkpoints to go on from: none of them trains."""

from pathlib import Path

import pytest
import torch
from olmo_trainer.checkpoint_manifest import Manifest
from olmo_trainer.config import LayoutConfig
from olmo_trainer.loop import _require_same_start
from olmo_trainer.mesh import create_mesh
from olmo_trainer.recipes import nano


def _start(rank: int, world: int, steps: list[int]) -> str:
    mesh = create_mesh(LayoutConfig(data=world), torch.device("cpu"))
    step = steps[rank]
    found = Manifest(Path("x"), step, nano(), "", {}, {}, {}) if step >= 0 else None
    try:
        _require_same_start(mesh, found)
    except ValueError as error:
        return str(error)
    return "starts"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("steps", "differ"), [([-1, -1], 0), ([4, 4], 0), ([4, 2], 1), ([-1, 4], 1), ([4, -1], 1)]
)
def test_all_ranks_start_from_one_checkpoint(processes, steps, differ):
    for answer in processes.run(_start, steps, world=2):
        if differ:
            assert f"got {differ} ranks that found another than rank 0 (step {steps[0]})" in answer
        else:
            assert answer == "starts"
