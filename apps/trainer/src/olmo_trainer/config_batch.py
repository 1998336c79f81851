"""A step's tokens, and how their number grows at the start of a run."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from olmo_trainer.config_node import Config


class NoBatchWarmup(Config):
    """Every step has the whole batch."""

    kind: Literal["none"] = "none"


class LinearBatchWarmup(Config):
    """The batch grows from `start` by `increment`s, evenly over the first `steps` steps."""

    kind: Literal["linear"] = "linear"
    start: int = Field(ge=1, description="sequences of the first step")
    increment: int = Field(ge=1, description="sequences that are added at a time")
    steps: int = Field(ge=1, description="steps before the whole batch")


BatchWarmupConfig = Annotated[NoBatchWarmup | LinearBatchWarmup, Field(discriminator="kind")]


class BatchConfig(Config):
    """A step's tokens. The global batch is the same under every layout."""

    sequences: int = Field(default=16, ge=1, description="sequences a step, over all ranks")
    accumulation: int = Field(
        default=1, ge=1, description="microbatches a data rank; of the whole batch"
    )
    warmup: BatchWarmupConfig = NoBatchWarmup()

    @model_validator(mode="after")
    def _warmup_reaches_the_batch(self) -> Self:
        warmup = self.warmup
        if isinstance(warmup, LinearBatchWarmup):
            missing = self.sequences - warmup.start
            if missing < 1 or missing % warmup.increment:
                raise ValueError(
                    f"warmup.start ({warmup.start}) plus some times warmup.increment "
                    f"({warmup.increment}) must be sequences ({self.sequences})"
                )
            if warmup.steps < missing // warmup.increment:
                raise ValueError(
                    f"warmup.steps ({warmup.steps}) must be at least the number of increments "
                    f"({missing // warmup.increment})"
                )
        return self

    def check_microbatches(self) -> None:
        """Raise `ValueError` unless every batch of the warm-up is whole microbatches."""
        warmup, whole = self.warmup, self.sequences // self.accumulation
        if isinstance(warmup, LinearBatchWarmup):
            for name, value in (("start", warmup.start), ("increment", warmup.increment)):
                if value % whole:
                    raise ValueError(
                        f"batch.warmup.{name} ({value}) must be a multiple of the sequences of one "
                        f"microbatch over all data ranks, batch.sequences / batch.accumulation "
                        f"({whole}); raise batch.accumulation"
                    )
