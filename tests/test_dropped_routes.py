"""Routes that find no room in a rowwise receive buffer: left out, counted once, on every rank."""

import math

import pytest
import torch
from olmo_routing import Router, Routing
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


def _report(rank: int, world: int, factor: float, recompute: str) -> tuple[list, list]:
    """Return what a rank logs of each layer, and the routes that its tokens asked for."""
    shared = ("layout.expert=2", "layout.dispatcher.kind=rowwise", "batch.sequences=4")
    settings = (
        f"layout.dispatcher.capacity_factor={factor}",
        *("layout.dispatcher.drop=tail", f"recompute.kind={recompute}"),
    )
    config = apply_overrides(nano(), [*shared, *settings]).for_world(world)
    assembly = assemble(config, create_mesh(config.layout, torch.device("cpu")))
    draw = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 257, (2, LENGTH + 1), generator=draw)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask)
    for bias in assembly.selection_biases.values():
        bias.bias_E.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))  # all want the first expert
    asked: dict[Router, tuple[torch.Tensor, torch.Tensor]] = {}

    def remember(router: Router, _: object, routing: Routing) -> None:
        asked.setdefault(router, (routing.expert_ids_TK, routing.weights_TK.detach()))

    for module in assembly.stages[0].modules():
        if isinstance(module, Router):
            module.register_forward_hook(remember)
    accumulate_gradients(assembly, [batch])
    reports = [layer.report for layer in assembly.statistics.layers(num_ranks=2)]
    return reports, list(asked.values())


@pytest.mark.dist
@pytest.mark.parametrize(("factor", "recompute"), [(1.0, "none"), (1.1, "none"), (1.1, "blocks")])
def test_kept_routes_are_counted_apart_from_requested_ones(processes, factor, recompute):
    answers = processes.run(_report, factor, recompute, world=2)
    (reports, _), (others, _) = answers
    assert reports == others
    room = math.ceil(factor * 2 * LENGTH * 2)
    for layer, report in enumerate(reports):
        # Rows lie by expert, rank, token; under `tail` what comes last finds no room.
        ids, weights = (
            torch.cat([routes[layer][part] for _, routes in answers]) for part in (0, 1)
        )
        requested = torch.bincount(ids.flatten(), minlength=4)
        assert requested[0] == len(ids)
        kept = requested.clone()
        kept[1] = min(int(requested[1]), room - len(ids))
        of_the_second = weights[ids == 1]  # by token: a token names an expert once
        lost = of_the_second[int(kept[1]) :]
        assert len(lost) > 0
        ranks, kept_ranks = requested.view(2, 2).sum(1), kept.view(2, 2).sum(1)
        expected = {
            "routes": requested.sum(),
            "imbalance": 4 * requested.max() / requested.sum(),
            "rank_imbalance": 2 * ranks.max() / ranks.sum(),
            "kept_imbalance": 4 * kept.max() / kept.sum(),
            "kept_rank_imbalance": 2 * kept_ranks.max() / kept_ranks.sum(),
            "dropped_routes": len(lost) / requested.sum(),
            "dropped_weight": lost.sum() / weights.sum(),
        }
        for name, value in expected.items():
            assert report[name] == pytest.approx(float(value), rel=1e-5), name
        assert report["kept_imbalance"] > report["imbalance"]
        assert report["kept_rank_imbalance"] < report["rank_imbalance"]
        assert "tokens_with_drops" not in report
