"""Routes that find no room in a rowwise receive buffer: left out, counted once, on every rank."""

import pytest
import torch
from olmo_trainer.build import assemble
from olmo_trainer.data import Batch
from olmo_trainer.mesh import create_mesh
from olmo_trainer.overrides import apply_overrides
from olmo_trainer.recipes import nano
from olmo_trainer.statistics import StepTotals
from olmo_trainer.step import accumulate_gradients, heldout_loss

LENGTH = 64


def _drop(rank: int, world: int, settings: tuple[str, ...]) -> tuple[StepTotals, float]:
    shared = ("layout.expert=2", "layout.dispatcher.kind=rowwise", "batch.sequences=4")
    config = apply_overrides(nano(), [*shared, *settings]).for_world(world)
    assembly = assemble(config, create_mesh(config.layout, torch.device("cpu")))
    draw = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 257, (2, LENGTH + 1), generator=draw)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask)
    for bias in assembly.selection_biases.values():
        bias.bias_E.copy_(torch.tensor([9.0, 9.0, -9.0, -9.0]))  # all to the first rank
    heldout_loss(assembly, [batch])
    assert not assembly.statistics.vector.any()
    accumulate_gradients(assembly, [batch])
    norm = torch.stack([each.main_grad.norm() for _, each in assembly.parameters]).norm()
    return assembly.statistics.totals(), norm.item()


@pytest.mark.dist
@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_routes_without_room_are_dropped_and_counted_once(processes, recompute):
    routes = 2 * 2 * 2 * LENGTH  # of a layer: two ranks, two sequences, two experts a token
    kind = f"recompute.kind={recompute}"
    for factor, dropped in (("2.0", 0), ("1.5", routes // 4), ("1", routes // 2)):
        settings = (f"layout.dispatcher.capacity_factor={factor}", kind)
        answers = processes.run(_drop, settings, world=2)
        for totals, norm in answers:
            assert totals.dropped == 3 * dropped  # of three routed layers
            assert totals.loss == answers[0][0].loss
            assert 0 < norm < 100
