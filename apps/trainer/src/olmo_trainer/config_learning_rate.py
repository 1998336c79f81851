"""How the learning rate goes over a run: up, perhaps level, and down."""

from typing import Annotated, Literal

from pydantic import Field

from olmo_trainer.config_node import Config


class WarmupConfig(Config):
    """What every schedule has: a linear warm-up, and where it ends."""

    warmup_steps: int = Field(default=20, ge=0)
    final_fraction: float = Field(
        default=0.1, ge=0, le=1, description="last over peak learning rate"
    )


class CosineSchedule(WarmupConfig):
    """Down along half a cosine from the end of the warm-up."""

    kind: Literal["cosine"] = "cosine"


class LinearSchedule(WarmupConfig):
    """Down in a line from the end of the warm-up."""

    kind: Literal["linear"] = "linear"


class WSDSchedule(WarmupConfig):
    """Warm-up, stable, decay: level until the last part of the run (arXiv 2404.06395)."""

    kind: Literal["wsd"] = "wsd"
    decay_fraction: float = Field(default=0.2, gt=0, le=1, description="of the run's steps")
    decay: Literal["linear", "square_root"] = Field(
        default="linear", description="square_root = down by the root of what has passed"
    )


ScheduleConfig = Annotated[
    CosineSchedule | LinearSchedule | WSDSchedule, Field(discriminator="kind")
]
