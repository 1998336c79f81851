"""What is trained: a recipe, a precision and a seed, each as values that `--set` takes.

Within a recipe everything but the precision is one, so that runs of one seed begin with the same
weights and see the same batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

BASELINE = "bf16"
_ALL = "precision.mxfp8=experts,shared,attention"

PRECISIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    BASELINE: ("BF16", ()),
    "rceil": ("exact MXFP8, rceil scales", (_ALL, "precision.recipe.scale_rule=rceil")),
    "floor": ("exact MXFP8, floor scales", (_ALL, "precision.recipe.scale_rule=floor")),
    "coarse": (
        "coarse MXFP8 (a scale for 128), rceil",
        (_ALL, "precision.recipe.scale_rule=rceil", "precision.recipe.granularity=128"),
    ),
    "rceil-all": (
        "exact MXFP8, rceil, weight gradients too",
        (_ALL, "precision.recipe.scale_rule=rceil", "precision.recipe.weight_grad=mxfp8"),
    ),
    "floor-all": (
        "exact MXFP8, floor, weight gradients too",
        (_ALL, "precision.recipe.scale_rule=floor", "precision.recipe.weight_grad=mxfp8"),
    ),
    "coarse-all": (
        "coarse MXFP8, rceil, weight gradients too",
        (
            *(_ALL, "precision.recipe.scale_rule=rceil", "precision.recipe.granularity=128"),
            "precision.recipe.weight_grad=mxfp8",
        ),
    ),
    # The same mathematics, rounded elsewhere: how far runs part that differ by nothing.
    "control": ("BF16 in two microbatches", ("batch.accumulation=2",)),
}
DEFAULT_PRECISIONS = "bf16,rceil,floor,coarse"

# Of the trainer's `toy`. Widths are multiples of 128, which coarse scales need: also keys.
RECIPES: dict[str, tuple[str, ...]] = {
    "toy": ("steps=1000", "model.attention.num_kv_heads=4"),
    "mid": (
        *("steps=1000", "schedule.warmup_steps=100", "optimizer.learning_rate=2e-3"),
        *("model.d_model=512", "model.num_layers=8", "model.dense_hidden=1536"),
        *("model.attention.num_heads=8", "model.attention.num_kv_heads=4"),
        *("model.attention.head_dim=64", "model.moe.num_experts=32", "model.moe.top_k=4"),
        *("model.moe.expert_hidden=256", "model.moe.shared_hidden=256"),
        *("data.sequence_length=512", "batch.sequences=8"),
    ),
}
_DRY = (
    *("steps=6", "schedule.warmup_steps=2", "model.d_model=128", "model.num_layers=2"),
    *("model.dense_hidden=64", "model.attention.num_heads=4", "model.attention.num_kv_heads=4"),
    *("model.attention.head_dim=32", "model.moe.num_experts=4", "model.moe.top_k=2"),
    *("model.moe.expert_hidden=128", "model.moe.shared_hidden=128", "data.sequence_length=16"),
    *("batch.sequences=4", "run.heldout_sequences=4"),
)
# Nothing but what is measured: no picture, no sample, one checkpoint that nobody keeps.
_RUN = (
    *("precision.parameters=bf16", "run.log_every=100", "run.heldout_every=0"),
    *("run.heldout_sequences=512", "run.save_every=0", "run.sample_bytes=0"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    recipe: str
    precision: str
    seed: int

    @property
    def name(self) -> str:
        """As a folder is named."""
        return f"{self.recipe}_{self.precision}_seed-{self.seed}"


def setting(recipe: str, *, device: str, steps: int | None, dry: bool) -> tuple[str, ...]:
    """Return what all runs of a recipe share, as `--set` takes it, each key once."""
    parts = [*_RUN, *RECIPES[recipe], *(_DRY if dry else ()), f"device={device}"]
    if steps is not None:
        parts += [f"steps={steps}", f"schedule.warmup_steps={steps // 12}"]
    return tuple({each.partition("=")[0]: each for each in parts}.values())


def settings_of(case: Case, shared: Sequence[str]) -> list[str]:
    """Return all that `--set` is given for a case, but for its folder."""
    return [*shared, *PRECISIONS[case.precision][1], f"seed={case.seed}"]
