"""How the ranks divide the work."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from olmo_trainer.config_node import Config


class OneFOneB(Config):
    """One forward, one backward; one stage a rank."""

    kind: Literal["one_f_one_b"] = "one_f_one_b"

    @property
    def stages_per_rank(self) -> int:
        """Virtual stages a rank."""
        return 1


class InterleavedOneFOneB(Config):
    """Interleaved 1F1B: `chunks` stages a rank, in a loop."""

    kind: Literal["interleaved"] = "interleaved"
    chunks: int = Field(default=2, ge=2)

    @property
    def stages_per_rank(self) -> int:
        """Virtual stages a rank."""
        return self.chunks


ScheduleConfig = Annotated[OneFOneB | InterleavedOneFOneB, Field(discriminator="kind")]


class LayoutConfig(Config):
    """How the ranks divide the work: `data * pipeline = world`, and `expert` divides `data`."""

    data: int | None = Field(default=None, ge=1, description="data ranks; none = world / pipeline")
    expert: int = Field(default=1, ge=1, description="ranks that share the experts, within `data`")
    pipeline: int = Field(default=1, ge=1)
    schedule: ScheduleConfig = OneFOneB()
    dispatcher: Literal["auto", "local", "all_to_all"] = Field(
        default="auto", description="auto = local for one expert rank, all_to_all for more"
    )

    @model_validator(mode="after")
    def _words_agree(self) -> Self:
        if self.dispatcher == "local" and self.expert > 1:
            raise ValueError(
                f"dispatcher 'local' needs expert = 1, got expert = {self.expert}; "
                "use 'auto' or 'all_to_all'"
            )
        if self.pipeline == 1 and self.schedule.stages_per_rank > 1:
            raise ValueError(
                "schedule 'interleaved' needs pipeline >= 2, got pipeline = 1; use 'one_f_one_b'"
            )
        return self

    @property
    def num_stages(self) -> int:
        """Virtual pipeline stages."""
        return self.pipeline * self.schedule.stages_per_rank
