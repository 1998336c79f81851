"""Every schedule a configuration names: who holds what, and that split backwards are right."""

from dataclasses import replace

import pytest
import torch
from olmo_pipeline import SplitRule, simulate, validate
from olmo_trainer import pipeline_schedule
from olmo_trainer.build import assemble
from olmo_trainer.config import LayoutConfig
from olmo_trainer.data import Batch
from olmo_trainer.mesh import create_mesh
from olmo_trainer.overrides import ConfigError, apply_overrides
from olmo_trainer.pipeline_schedule import build_schedule
from olmo_trainer.recipes import nano
from olmo_trainer.sizes import bytes_per_rank, count_parameters, layers_of_ranks
from olmo_trainer.step import accumulate_gradients
from olmo_trainer.verify import split_batch

STAGES = {
    "gpipe": 1,
    "one_f_one_b": 1,
    "interleaved": 2,
    "v_shape": 2,
    "zero_bubble_h1": 1,
    "zero_bubble_v": 2,
    "dual_pipe_v": 2,
    "search": 2,
}
SPLIT = {"zero_bubble_h1", "zero_bubble_v", "dual_pipe_v"}


def _layout(kind: str, pipeline: int) -> LayoutConfig:
    return LayoutConfig.model_validate({"pipeline": pipeline, "schedule": {"kind": kind}})


@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("pipeline", [2, 4])
def test_a_rank_holds_what_its_schedule_says(kind, pipeline):
    layout = _layout(kind, pipeline)
    schedule = build_schedule(layout, 3)
    assert layout.num_stages == schedule.num_stages == pipeline * STAGES[kind]
    ranks = tuple(layout.rank_of_stage(stage) for stage in range(schedule.num_stages))
    assert ranks == schedule.rank_of_stage
    assert schedule.splits_backward == (kind in SPLIT)
    assert schedule.num_microbatches == 3


@pytest.mark.parametrize("backward", ["whole", "split"])
def test_a_searched_schedule_keeps_its_cap_and_is_the_same_every_time(backward):
    words = {"kind": "search", "memory_cap": 5, "backward": backward}
    layout = LayoutConfig.model_validate({"pipeline": 4, "schedule": words})
    schedule = build_schedule(layout, 6)
    validate(schedule, max_live=5)
    assert schedule.splits_backward == (backward == "split")
    assert build_schedule(layout, 6) == schedule  # ranks search each for itself
    uncapped = LayoutConfig.model_validate({"pipeline": 4, "schedule": {"kind": "search"}})
    peak = max(simulate(build_schedule(uncapped, 6)).peak_live_per_rank)
    assert peak > 5


def test_on_a_v_the_first_rank_holds_both_ends():
    settings = ["layout.pipeline=2", "layout.schedule.kind=v_shape", "layout.data=1"]
    config = apply_overrides(nano(), settings)
    assert layers_of_ranks(config) == [[range(0, 1), range(3, 4)], [range(1, 2), range(2, 3)]]
    counts = count_parameters(config.model)
    experts = counts.num_experts * counts.expert
    ends = counts.embedding + counts.head + counts.dense[0] + counts.dense[3] + experts
    assert bytes_per_rank(config, weights="fp32") == 20 * ends


def _gradients(kind: str, monkeypatch, calls: list[str]) -> dict[str, torch.Tensor]:
    """Gradients of one process whose backward is split, or not."""
    rules = pipeline_schedule.SPLIT_RULES
    (operator, rule), *_ = rules.items()

    def watched(*arguments):
        calls.append("weight")
        return rule.weight_gradients(*arguments)

    monkeypatch.setitem(rules, operator, SplitRule(rule.input_gradient, watched, rule.applies))
    settings = [f"layout.schedule.kind={kind}", "batch.accumulation=2"]
    config = apply_overrides(nano(), settings).for_world(1)
    assembly = assemble(config, create_mesh(config.layout, torch.device("cpu")))
    tokens = torch.randint(0, 257, (4, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(4, 16, dtype=torch.bool)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask)
    accumulate_gradients(assembly, split_batch(batch, 2))
    return {
        name: each.main_grad.clone()  # pyright: ignore[reportAttributeAccessIssue] - the reducer's
        for name, each in assembly.parameters
    }


def test_the_products_of_experts_are_split(monkeypatch):
    calls: list[str] = []
    split = _gradients("zero_bubble_h1", monkeypatch, calls)
    # Two products of three routed layers for two microbatches wait for the weight gradient.
    assert len(calls) == 2 * 3 * 2
    whole = _gradients("one_f_one_b", monkeypatch, calls)
    assert len(calls) == 2 * 3 * 2
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-5, atol=1e-7)
        assert gradient.any(), name


def test_a_batch_may_grow_under_any_number_of_microbatches(monkeypatch):
    config = apply_overrides(nano(), ["batch.accumulation=4"]).for_world(1)
    assembly = assemble(config, create_mesh(config.layout, torch.device("cpu")))
    tokens = torch.randint(0, 257, (4, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(4, 16, dtype=torch.bool)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask)
    losses = []
    for parts in (4, 1, 2, 4):
        accumulate_gradients(assembly, split_batch(batch, parts))
        losses.append(assembly.statistics.totals())
    assert losses[0] == losses[3]
    assert losses[1].loss == pytest.approx(losses[0].loss, rel=1e-6)
    assert replace(losses[2], loss=0, auxiliary_loss=0) == replace(
        losses[0], loss=0, auxiliary_loss=0
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["layout.schedule.kind=x"], "layout.schedule.kind = 'x': must be one of 'gpipe', 'one_f"),
        (["layout.schedule.kind=dual_pipe_v"], "schedule 'dual_pipe_v' needs pipeline >= 2"),
        (
            ["layout.pipeline=2", "layout.schedule.kind=search", "layout.schedule.memory_cap=1"],
            "layout.schedule.memory_cap = 1: input should be greater than or equal to 2",
        ),
        (["layout.schedule.kind=search"], "schedule 'search' needs pipeline >= 2"),
        (["layout.schedule.chunks=2"], "layout.schedule.chunks: no such key for kind = 'one_f_one"),
        (
            ["layout.schedule.kind=zero_bubble_v", "layout.pipeline=4"],
            r"num_layers \(4\) must be at least .* stages a rank \(8\)",
        ),
    ],
)
def test_a_wrong_schedule_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(nano(), settings)
