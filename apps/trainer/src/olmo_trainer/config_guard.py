"""What happens to a step that would do harm."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from olmo_trainer.config_node import Config


class StopGuard(Config):
    """A step whose gradient is not finite ends the run, before anything is changed."""

    kind: Literal["stop"] = "stop"


class SkipGuard(Config):
    """A step whose loss or gradient norm is not finite, or spikes, is left out and counted.

    A value spikes when it is more than `limit` deviations above the median of the last `window`
    finite ones, and at least `least_history` of them are known.
    """

    kind: Literal["skip"] = "skip"
    window: int = Field(default=128, ge=2, description="steps remembered")
    least_history: int = Field(default=32, ge=2, description="steps before anything is a spike")
    limit: float = Field(default=6.0, gt=0, description="deviations above the median")
    patience: int = Field(
        default=20, ge=1, description="steps skipped in a row that end the run all the same"
    )

    @model_validator(mode="after")
    def _window_holds_the_history(self) -> Self:
        if self.least_history > self.window:
            raise ValueError(
                f"least_history ({self.least_history}) must be at most window ({self.window})"
            )
        return self


GuardConfig = Annotated[StopGuard | SkipGuard, Field(discriminator="kind")]
