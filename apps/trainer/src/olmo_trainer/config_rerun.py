"""What happens to a step whose routes found too little room."""

from typing import Annotated, Literal

from pydantic import Field

from olmo_trainer.config_node import Config


class NoRerun(Config):
    """Every step is taken as it comes; dropped routes are counted."""

    kind: Literal["none"] = "none"


class DropsRerun(Config):
    """A step that drops more than `most_dropped` of its routes is run again, with larger buffers.

    Each time the capacity factor of the dispatcher grows by `growth`, and it stays as large for the
    steps that follow. A step whose loss is not finite is left to the guard. The host reads three
    numbers a step for this, and waits for the device.
    """

    kind: Literal["drops"] = "drops"
    most_dropped: float = Field(
        default=0.0, ge=0, lt=1, description="part of a step's routes that may be dropped"
    )
    growth: float = Field(default=1.5, ge=1.1, description="of the capacity factor, each time")
    most_capacity_factor: float | None = Field(
        default=None, gt=0, description="none = up to the worst case, where nothing is dropped"
    )
    most_times: int = Field(default=8, ge=1, description="that one step is run again")
    at_limit: Literal["take", "stop"] = Field(
        default="take",
        description="of a step that drops too much all the same: take it, or end the run before it",
    )


RerunConfig = Annotated[NoRerun | DropsRerun, Field(discriminator="kind")]
