import pytest
import torch
from olmo_ep_comm import create_dispatcher
from olmo_trainer.build import build_part
from olmo_trainer.config import AttentionConfig, ModelConfig, MoEConfig, TrainerConfig
from olmo_trainer.overrides import apply_overrides
from olmo_trainer.recipes import RECIPES, nano
from olmo_trainer.sizes import bytes_per_rank, count_parameters, stage_layers

# The report's table 30: width, query width, key width, hidden, layers, dense layers, experts.
PUBLISHED = {
    "tiny-64e": ((2048, 2048, 512, 2048, 16, 1, 64), 1.5876e9, 12.912e9),
    "small-64e": ((2560, 3072, 768, 2560, 32, 1, 64), 4.2941e9, 40.863e9),
    "medium-64e": ((3072, 4096, 1024, 3072, 39, 2, 64), 7.3719e9, 70.224e9),
    "medium-128e": ((3072, 4096, 1024, 3072, 39, 2, 128), 7.3792e9, 137.273e9),
    "large-128e": ((4096, 5120, 1280, 4096, 47, 2, 128), 15.1386e9, 295.989e9),
    "ultra-256e": ((6144, 8192, 4096, 8192, 63, 2, 256), 58.4067e9, 2379.50e9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_reproduce_every_published_digit(name):
    (width, query, keys, hidden, layers, dense, experts), active, total = PUBLISHED[name]
    model = ModelConfig(
        vocab_size=100_352,
        d_model=width,
        num_layers=layers,
        num_dense_layers=dense,
        dense_hidden=5 * hidden,
        attention=AttentionConfig(num_heads=query // 128, num_kv_heads=keys // 128, head_dim=128),
        moe=MoEConfig(num_experts=experts, top_k=4, expert_hidden=hidden, shared_hidden=hidden),
    )
    counts = count_parameters(model)
    assert counts.active == pytest.approx(active, abs=0.6e5)
    assert counts.total == pytest.approx(total, abs=0.6e7 if total > 1e12 else 0.6e6)


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


def test_stages_cover_the_layers_in_order():
    config = apply_overrides(nano(), ["layout.pipeline=2"]).for_world(2)
    parts = stage_layers(config)
    assert [layer for part in parts for layer in part] == list(range(config.model.num_layers))
