"""The held-out loss is the same number under every layout, and costs training nothing."""

import pytest
import torch
from olmo_trainer.build import assemble
from olmo_trainer.config import LayoutConfig
from olmo_trainer.data import Batch
from olmo_trainer.mesh import create_mesh
from olmo_trainer.recipes import nano
from olmo_trainer.step import accumulate_gradients, heldout_loss
from olmo_trainer.verify import split_batch

LAYOUTS = ((1, 1, 1), (2, 2, 1), (1, 1, 2), (2, 2, 2))


def _batch(seed: int, sequences: int, length: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 257, (sequences, length + 1), generator=generator)
    mask = torch.arange(length) < torch.randint(1, length + 1, (sequences, 1), generator=generator)
    targets = tokens[:, 1:].masked_fill(~mask, -100)
    return Batch(tokens[:, :-1].masked_fill(~mask, 256), targets, mask)


def _evaluate(rank: int, world: int, layout: tuple[int, int, int]) -> list[float]:
    data, expert, pipeline = layout
    config = nano().model_copy(
        update={"layout": LayoutConfig(data=data, expert=expert, pipeline=pipeline)}
    )
    config = config.for_world(world)
    assembly = assemble(config, create_mesh(config.layout, torch.device("cpu")))
    mine = slice(assembly.mesh.data, None, data)
    # Another length and another number of batches than training has; the last is part padding.
    heldout = split_batch(_batch(0, 12, 40), 6)[mine]
    train = split_batch(_batch(1, 4, 24), data)[mine]
    numbers = [heldout_loss(assembly, heldout)[0]]
    accumulate_gradients(assembly, train)
    numbers.append(assembly.statistics.totals().loss)
    numbers.append(heldout_loss(assembly, heldout)[0])
    accumulate_gradients(assembly, train)
    numbers.append(assembly.statistics.totals().loss)
    return numbers


@pytest.mark.dist
def test_heldout_loss_before_and_between_steps(processes):
    expected = None
    for layout in LAYOUTS:
        per_rank = processes.run(_evaluate, layout, world=layout[0] * layout[2])
        assert all(numbers == per_rank[0] for numbers in per_rank)
        first, loss, second, again = per_rank[0]
        assert first == second
        assert loss == again
        expected = expected or per_rank[0]
        assert per_rank[0] == pytest.approx(expected, rel=1e-5)
