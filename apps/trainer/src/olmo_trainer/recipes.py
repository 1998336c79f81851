"""Recipes: functions that return a whole configuration. The command line knows `RECIPES`."""

from collections.abc import Callable

from olmo_trainer.config import (
    AdamWConfig,
    AttentionConfig,
    BatchConfig,
    CosineSchedule,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    MoEConfig,
    PrecisionConfig,
    RunConfig,
    TrainerConfig,
)
from olmo_trainer.recipes_olmo_core_3 import report_recipes


def toy() -> TrainerConfig:
    """A 2M-parameter model on Python's own source: two minutes on a laptop CPU."""
    return TrainerConfig(
        name="toy",
        steps=450,
        data=DataConfig(sequence_length=128),
        batch=BatchConfig(sequences=16),
        optimizer=AdamWConfig(learning_rate=6e-3),
        schedule=CosineSchedule(warmup_steps=30),
        run=RunConfig(log_every=50, heldout_every=150, heldout_sequences=512),
    )


def toy_mxfp8() -> TrainerConfig:
    """The toy with its expert and shared layers in MXFP8, computed exactly on any device."""
    return toy().model_copy(
        update={"name": "toy-mxfp8", "precision": PrecisionConfig(mxfp8=("experts", "shared"))}
    )


def nano() -> TrainerConfig:
    """A tiny model and ten steps: to try a layout or a change in seconds."""
    return TrainerConfig(
        name="nano",
        steps=10,
        model=ModelConfig(
            d_model=32,
            num_layers=4,
            dense_hidden=64,
            attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=16),
            moe=MoEConfig(num_experts=4, expert_hidden=32, shared_hidden=32),
        ),
        data=DataConfig(sequence_length=64),
        batch=BatchConfig(sequences=8),
        schedule=CosineSchedule(warmup_steps=2),
        run=RunConfig(log_every=2, heldout_every=5, heldout_sequences=16, sample_bytes=40),
    )


def olmoe_1b_7b() -> TrainerConfig:
    """OLMoE-1B-7B (arXiv 2409.02060): the start of `import`, and a model to train from nothing."""
    return TrainerConfig(
        name="olmoe-1b-7b",
        steps=10_000,
        model=ModelConfig(
            vocab_size=50_304,
            d_model=2048,
            num_layers=16,
            num_dense_layers=0,
            norms="pre",
            norm_eps=1e-5,
            attention=AttentionConfig(
                num_heads=16, num_kv_heads=16, head_dim=128, qk_norm="projection"
            ),
            moe=MoEConfig(
                num_experts=64,
                top_k=8,
                expert_hidden=1024,
                shared_hidden=0,
                route_weights="scores",
                balance_loss=0.01,
                balance_scope="microbatch",
                z_loss=1e-3,
                bias_rate=0.0,
            ),
        ),
        data=DataConfig(sequence_length=4096),
        batch=BatchConfig(sequences=1024, accumulation=32),
        optimizer=AdamWConfig(learning_rate=4e-4),
        schedule=CosineSchedule(warmup_steps=2500),
        layout=LayoutConfig(expert=8),
        run=RunConfig(save_every=1000, heldout_every=1000, sample_bytes=0, layers_every=10),
    )


RECIPES: dict[str, Callable[[], TrainerConfig]] = {
    "toy": toy,
    "toy-mxfp8": toy_mxfp8,
    "nano": nano,
    "olmoe-1b-7b": olmoe_1b_7b,
    **report_recipes(),
}
