"""One rank that cannot write: every rank says so, none waits for ever, and the next save works."""

import time
from pathlib import Path

import pytest
import torch
from olmo_trainer import checkpoint, checkpoint_storage
from olmo_trainer.build import assemble
from olmo_trainer.checkpoint import SaveError
from olmo_trainer.checkpoint_manifest import find_checkpoint, read_manifest
from olmo_trainer.checkpoint_saver import CheckpointSaver
from olmo_trainer.config import LayoutConfig
from olmo_trainer.mesh import create_mesh
from olmo_trainer.recipes import nano


def _fail_on(rank: int, world: int, culprit: int, place: str, folder: str) -> list[str]:
    config = nano().model_copy(update={"layout": LayoutConfig(data=2, expert=2)}).for_world(world)
    assembly = assemble(config, create_mesh(config.layout, torch.device("cpu")))
    said: list[str] = []
    saver = CheckpointSaver(
        assembly, Path(folder), data_fingerprint="", versions={}, say=said.append
    )
    module = {"write_tensors": checkpoint_storage, "write_manifest": checkpoint}[place]
    original = getattr(module, place)

    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    saver.save_now(1)
    if rank == culprit:
        setattr(module, place, fail)
    try:
        saver.save(2)
        # The collectives of training go on beside the save.
        for _ in range(20):
            assert assembly.mesh.sum_over_world(torch.ones(1)) == world
        deadline = time.monotonic() + 30
        while not saver.failed and time.monotonic() < deadline:
            time.sleep(0.01)
        assert saver.failed
        with pytest.raises(SaveError):
            saver.save_now(3)
    finally:
        setattr(module, place, original)
    assembly.mesh.barrier()
    found = find_checkpoint(Path(folder))
    assert read_manifest(found).step == 1
    assembly.mesh.barrier()
    assert saver.save_now(4).name == "step-00000004"
    return said


@pytest.mark.dist
@pytest.mark.parametrize(
    ("culprit", "place"), [(1, "write_tensors"), (0, "write_tensors"), (0, "write_manifest")]
)
def test_all_ranks_hear_of_it(processes, tmp_path, culprit, place):
    said = processes.run(_fail_on, culprit, place, str(tmp_path), world=2, timeout=60.0)
    for of_rank in said:
        assert len(of_rank) == 2
        assert all(f"not saved: rank {culprit}: OSError" in each for each in of_rank)
