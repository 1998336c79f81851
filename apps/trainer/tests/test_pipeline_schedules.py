"""Every schedule a configuration names: who holds what, and that split backwards are right."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from olmo_pipeline import simulate, validate
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


MXFP8 = ("model.attention.num_kv_heads=2", "precision.mxfp8=experts,shared,attention")


def _batch(sequences: int) -> Batch:
    tokens = torch.randint(0, 257, (sequences, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(sequences, 16, dtype=torch.bool)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask)


def _measure(rank: int, world: int, *settings: str) -> tuple[float, dict[str, torch.Tensor], int]:
    """Return the loss, this rank's gradients by name, and how many calls left theirs for later."""
    config = apply_overrides(nano(), settings).for_world(world)
    assembly = assemble(config, create_mesh(config.layout, torch.device("cpu")))
    count = config.batch.accumulation
    waited: list[int] = []
    for stage in assembly.stages.values():
        for layer in stage.part.modules():
            if (ask := getattr(layer, "defer", None)) is not None:
                layer.defer = partial(_counted, ask, waited)  # pyright: ignore[reportAttributeAccessIssue]
    accumulate_gradients(assembly, split_batch(_batch(2 * count), count))
    gradients = {
        name: each.main_grad.clone()  # pyright: ignore[reportAttributeAccessIssue] - the reducer's
        for name, each in assembly.parameters
    }
    return assembly.statistics.totals().loss, gradients, len(waited)


def _counted(ask, waited, weights):
    later = ask(weights)

    def counting(compute):
        later(lambda: waited.append(len(weights)) or compute())

    return None if later is None else counting


def _assert_near(split: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    assert split.keys() == whole.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-5, atol=1e-7)
        assert gradient.any(), name


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ((), 2 * 3),  # two products in each of three routed layers
        (("recompute.kind=experts",), 2 * 3),
        (MXFP8, 3 + 2 * 3 + 4 * 4),  # experts, the shared one's products, those of attention
        ((*MXFP8, "recompute.kind=blocks"), 3 + 2 * 3 + 4 * 4),
    ],
    ids=["plain", "recomputed", "MXFP8", "MXFP8, recomputed"],
)
def test_layers_with_a_backward_of_their_own_are_split(settings, calls):
    settings = (*settings, "batch.accumulation=2")
    loss, split, waited = _measure(0, 1, *settings, "layout.schedule.kind=zero_bubble_h1")
    assert waited == 2 * calls
    expected, whole, waited = _measure(0, 1, *settings)
    assert waited == 0
    assert loss == expected
    _assert_near(split, whole)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["zero_bubble_h1", "zero_bubble_v", "dual_pipe_v"])
def test_a_pipeline_of_quantised_layers_splits_as_it_trains(processes, kind):
    """No warning of layers that stay whole either: it would be an error here."""
    settings = (*MXFP8, "layout.pipeline=2", "batch.accumulation=4")
    whole = processes.run(_measure, *settings, world=2)
    split = processes.run(_measure, *settings, f"layout.schedule.kind={kind}", world=2)
    assert sum(loss for loss, *_ in split) == sum(loss for loss, *_ in whole)
    merged = [{k: v for _, part, _ in ranks for k, v in part.items()} for ranks in (split, whole)]
    _assert_near(*merged)
    assert all(waited > 0 for *_, waited in split)


@pytest.mark.parametrize("kind", ["one_f_one_b", "zero_bubble_h1"])
def test_a_batch_may_grow_under_any_number_of_microbatches(kind):
    settings = ["batch.accumulation=4", f"layout.schedule.kind={kind}"]
    config = apply_overrides(nano(), settings).for_world(1)
    assembly = assemble(config, create_mesh(config.layout, torch.device("cpu")))
    losses = []
    for parts in (4, 1, 2, 4):
        accumulate_gradients(assembly, split_batch(_batch(4), parts))
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
