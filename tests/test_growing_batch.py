"""A pipeline of two ranks runs batches that grow, and gives the losses of one process."""

import pytest
import torch
from olmo_trainer.build import Assembly, assemble
from olmo_trainer.data import Batch
from olmo_trainer.mesh import create_mesh
from olmo_trainer.overrides import apply_overrides
from olmo_trainer.recipes import nano
from olmo_trainer.statistics import StepTotals
from olmo_trainer.step import accumulate_gradients, heldout_loss
from olmo_trainer.verify import split_batch

LENGTH = 64


def _assembly(world: int, *settings: str) -> Assembly:
    config = apply_overrides(nano(), settings).for_world(world)
    return assemble(config, create_mesh(config.layout, torch.device("cpu")))


def _batch(sequences: int) -> Batch:
    tokens = torch.randint(
        0, 257, (sequences, LENGTH + 1), generator=torch.Generator().manual_seed(2)
    )
    mask = torch.ones(sequences, LENGTH, dtype=torch.bool)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask)


def _grow(rank: int, world: int, settings: tuple[str, ...]) -> list[StepTotals]:
    """Run batches of 1, 2 and 4 microbatches of 2 sequences, with an evaluation between."""
    assembly, found = _assembly(world, "batch.accumulation=4", *settings), []
    for count in (1, 2, 4, 1):
        accumulate_gradients(assembly, split_batch(_batch(2 * count), count))
        found.append(assembly.statistics.totals())
        heldout_loss(assembly, [_batch(2)])
    return found


@pytest.mark.dist
def test_a_pipeline_runs_batches_that_grow(processes):
    settings = ("layout.pipeline=2", "layout.schedule.kind=zero_bubble_v", "loss.z_loss=0.01")
    first, second = processes.run(_grow, settings, world=2)
    assert first == second  # every rank knows every loss
    (alone,) = processes.run(_grow, ("loss.z_loss=0.01",), world=1)
    for found, expected in zip(first, alone, strict=True):
        assert found.tokens == expected.tokens
        for name in ("loss", "auxiliary_loss", "head_z_loss"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-6)
    assert first[0] == first[3]
    assert [each.tokens for each in first] == [128, 256, 512, 128]
