"""The models of the Olmo-core 3 report, every shape it states, with the layouts it ran them in.

Sources: the production points of its table 30 with the shapes behind them, and the 8-layer models
of its figure 4, whose total capacity grows while a token's work stays. All have 8,192 positions, 4
experts a token, one shared expert as wide as a routed one, and dense layers of 5 times that width.

Where the text leaves a choice open, `tests/test_recipes_olmo_core_3.py` finds the one that gives
the published counts: embedding and head are two tables and both count as active, as do the routers;
each block has four norms of the width of the model and two of a head's; no product has a bias.

As there: layout, two stages a rank, batch and microbatch, BF16 or MXFP8, recompute, the path of the
rows and its capacity factor, which routes are dropped, the losses and the optimizer.
`ultra-256e` takes DeepEP v2, because its 32 expert ranks are on four hosts: where it is not
installed a run says so at once, and `layout.dispatcher.kind=all_to_all` goes without.

Not stated there, and ours: the level of the learning rate (its growth, batch ** 0.53, is the
report's), the schedule and the number of steps, the coefficient of the balance loss within the
stated 0.005 to 0.01; of the 8-layer models the batch, the path of the rows, the losses and the
optimizer. Otherwise than there: the points were measured with random routing, and these recipes
train the router; the two dense layers of the MXFP8 points and the rows between ranks stay in BF16.
"""

from collections.abc import Callable
from dataclasses import dataclass

from olmo_trainer.config import (
    AdamWConfig,
    AttentionConfig,
    AutoDispatcher,
    BatchConfig,
    BlocksRecompute,
    CosineSchedule,
    DataConfig,
    DeepEPDispatcher,
    InterleavedOneFOneB,
    LayoutConfig,
    LocalDispatcher,
    LossConfig,
    ModelConfig,
    MoEConfig,
    NoRecompute,
    OneFOneB,
    PrecisionConfig,
    RowwiseDispatcher,
    RunConfig,
    TrainerConfig,
)
from olmo_trainer.config_dispatcher import DispatcherConfig

POSITIONS = 8192
HEAD_DIM = 128
VOCABULARY = 100_352
TOP_K = 4
ROWWISE = RowwiseDispatcher(capacity_factor=1.1875, drop="tail")
HEAD_Z_LOSS = 1e-4
RATE, RATE_BATCH, RATE_POWER = 3e-4, 1024, 0.53  # learning rate at a batch, and how it grows


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the points of one name share."""

    layers: int
    dense_layers: int
    width: int
    query: int  # width of all query heads
    keys: int  # of all key heads, and of all value heads
    hidden: int  # of an expert, and of the shared expert


@dataclass(frozen=True, kw_only=True)
class Point:
    """One row of the table."""

    shape: Shape
    experts: int
    gpus: int  # on which the report ran it
    sequences: int  # of the global batch
    accumulation: int  # microbatches of a data rank, on so many GPUs
    expert: int = 8  # ranks that share the experts
    pipeline: int = 1
    dispatcher: DispatcherConfig = ROWWISE
    is_ultra: bool = False  # MXFP8, and every block computed again

    @property
    def model(self) -> ModelConfig:
        """The model of this row."""
        shape = self.shape
        return ModelConfig(
            vocab_size=VOCABULARY,
            d_model=shape.width,
            num_layers=shape.layers,
            num_dense_layers=shape.dense_layers,
            dense_hidden=(TOP_K + 1) * shape.hidden,
            attention=AttentionConfig(
                num_heads=shape.query // HEAD_DIM,
                num_kv_heads=shape.keys // HEAD_DIM,
                head_dim=HEAD_DIM,
                rope_theta=5e5,
            ),
            moe=MoEConfig(
                num_experts=self.experts,
                top_k=TOP_K,
                expert_hidden=shape.hidden,
                shared_hidden=shape.hidden,
                balance_loss=0.005,
                balance_scope="microbatch",
                z_loss=2e-4,
                bias_rate=0.0,
            ),
        )

    def config(self, name: str) -> TrainerConfig:
        """Return the whole configuration; its number of data ranks is that of the processes."""
        return TrainerConfig(
            name=name,
            steps=1000,
            model=self.model,
            precision=PrecisionConfig(
                mxfp8=("experts", "shared", "attention") if self.is_ultra else ()
            ),
            recompute=BlocksRecompute() if self.is_ultra else NoRecompute(),
            data=DataConfig(sequence_length=POSITIONS),
            batch=BatchConfig(sequences=self.sequences, accumulation=self.accumulation),
            loss=LossConfig(z_loss=HEAD_Z_LOSS),
            optimizer=AdamWConfig(learning_rate=RATE * (self.sequences / RATE_BATCH) ** RATE_POWER),
            schedule=CosineSchedule(warmup_steps=100),
            layout=LayoutConfig(
                expert=self.expert,
                pipeline=self.pipeline,
                dispatcher=self.dispatcher,
                schedule=InterleavedOneFOneB(chunks=2) if self.pipeline > 1 else OneFOneB(),
            ),
            run=RunConfig(log_every=1, sample_bytes=0, layers_every=10),
        )


_TINY = Shape(layers=16, dense_layers=1, width=2048, query=2048, keys=512, hidden=2048)
_SMALL = Shape(layers=32, dense_layers=1, width=2560, query=3072, keys=768, hidden=2560)
_MEDIUM = Shape(layers=39, dense_layers=2, width=3072, query=4096, keys=1024, hidden=3072)
_LARGE = Shape(layers=47, dense_layers=2, width=4096, query=5120, keys=1280, hidden=4096)
_ULTRA = Shape(layers=63, dense_layers=2, width=6144, query=8192, keys=4096, hidden=8192)
_CAPACITY = Shape(layers=8, dense_layers=1, width=4096, query=4096, keys=1024, hidden=4096)

POINTS: dict[str, Point] = {
    "tiny-64e": Point(
        shape=_TINY,
        experts=64,
        gpus=16,
        sequences=1024,
        accumulation=8,
        expert=1,
        dispatcher=LocalDispatcher(),
    ),
    "small-64e": Point(shape=_SMALL, experts=64, gpus=128, sequences=3072, accumulation=8),
    "medium-64e": Point(
        shape=_MEDIUM, experts=64, gpus=128, sequences=2048, accumulation=16, pipeline=2
    ),
    "medium-96e": Point(
        shape=_MEDIUM, experts=96, gpus=128, sequences=3072, accumulation=24, pipeline=2
    ),
    "medium-128e": Point(
        shape=_MEDIUM, experts=128, gpus=128, sequences=3072, accumulation=48, pipeline=4
    ),
    "large-128e": Point(
        shape=_LARGE, experts=128, gpus=512, sequences=4096, accumulation=32, pipeline=4
    ),
    "ultra-128e": Point(
        shape=_ULTRA,
        experts=128,
        gpus=512,
        sequences=8192,
        accumulation=128,
        pipeline=8,
        is_ultra=True,
    ),
    "ultra-256e": Point(
        shape=_ULTRA,
        experts=256,
        gpus=512,
        sequences=8192,
        accumulation=64,
        expert=32,
        pipeline=8,
        dispatcher=DeepEPDispatcher(),
        is_ultra=True,
    ),
} | {
    f"capacity-{experts}e": Point(
        shape=_CAPACITY,
        experts=experts,
        gpus=8,
        sequences=16,
        accumulation=1,
        dispatcher=AutoDispatcher(),
    )
    for experts in (8, 16, 32, 64, 128)
}


def report_recipes() -> dict[str, Callable[[], TrainerConfig]]:
    """Return a recipe for each point, by its name."""
    return {name: _recipe(name, point) for name, point in POINTS.items()}


def _recipe(name: str, point: Point) -> Callable[[], TrainerConfig]:
    def recipe() -> TrainerConfig:
        return point.config(name)

    family = name.partition("-")[0]
    recipe.__doc__ = (
        f"The report's {family} model with {point.experts} experts, there on {point.gpus} GPUs."
    )
    return recipe
