import pytest
import torch
from olmo_ep_comm import create_dispatcher
from olmo_trainer.build import build_part
from olmo_trainer.config import TrainerConfig
from olmo_trainer.overrides import apply_overrides
from olmo_trainer.recipes import RECIPES, nano
from olmo_trainer.sizes import (
    bytes_per_rank,
    count_attention_flops,
    count_document_flops,
    count_flops,
    count_parameters,
    stage_layers,
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_counts_equal_the_built_model(recipe):
    config = RECIPES[recipe]()
    dispatcher = create_dispatcher("local", num_experts=config.model.moe.num_experts)
    with torch.device("meta"):
        part = build_part(config, range(config.model.num_layers), dispatcher, num_expert_ranks=1)
    built = sum(parameter.numel() for parameter in part.parameters())
    counts = count_parameters(config.model)
    assert counts.total == built
    assert counts.active < counts.total


def _bytes(*settings: str, world: int, weights: str = "bf16") -> float:
    config: TrainerConfig = apply_overrides(nano(), settings).for_world(world)
    return bytes_per_rank(config, weights=weights)


def test_bytes_follow_the_report():
    counts = count_parameters(nano().model)
    assert _bytes(world=1) == pytest.approx(18 * counts.total)
    assert _bytes(world=1, weights="fp32") == pytest.approx(20 * counts.total)
    assert _bytes(world=4) == pytest.approx((6 + 12 / 4) * counts.total)
    experts = counts.num_moe_layers * counts.num_experts * counts.expert
    expected = (6 + 12 / 4) * (counts.total - experts) + (6 / 4 + 12 / 4) * experts
    assert _bytes("layout.expert=4", world=4) == pytest.approx(expected)
    assert _bytes("layout.expert=4", "layout.context=2", world=4) == pytest.approx(expected)


def test_stages_cover_the_layers_in_order():
    config = apply_overrides(nano(), ["layout.pipeline=2"]).for_world(2)
    parts = stage_layers(config)
    assert [layer for part in parts for layer in part] == list(range(config.model.num_layers))


@pytest.mark.parametrize("window", [0, 1, 5, 16, 40])
def test_operations_of_attention_are_those_of_the_positions_seen(window):
    settings = [f"model.attention.window={window}"]
    if window:
        settings.append("model.attention.full_every=2")
    positions, query = 16, nano().model.attention.num_heads * nano().model.attention.head_dim
    model = apply_overrides(nano(), settings).model

    def operations(wide: int) -> float:
        pairs = sum(min(at, wide) for at in range(1, positions + 1))
        # The report counts half of S * S where the pairs are S * (S + 1) / 2.
        return 12 * query * (pairs - wide / 2) / positions

    wide = min(window or positions, positions)
    saved = 2 * (operations(positions) - operations(wide))  # two of the four layers slide
    everything = count_flops(nano().model, positions)
    assert count_flops(model, positions) == pytest.approx(everything - saved, rel=1e-12)
    head = 6 * nano().model.d_model * nano().model.vocab_size
    assert everything > head + 4 * operations(positions)


def test_attention_within_documents_costs_what_each_does():
    model = apply_overrides(nano(), ["model.attention.window=8"]).model
    lengths = [3, 20, 3, 64]
    each = [count_attention_flops(model, length) for length in lengths]
    assert count_document_flops(model, lengths) == pytest.approx(sum(each))
    assert count_document_flops(model, []) == 0
