"""How the ranks divide the work."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from olmo_trainer.config_dispatcher import AutoDispatcher, DispatcherConfig
from olmo_trainer.config_node import Config


class PipelineSchedule(Config):
    """What every schedule says of itself: how many stages a rank holds, and which.

    On the loop rank r of P holds stages r, r + P, ...; on the V it holds r and 2 P - 1 - r.
    """

    stages_per_rank: ClassVar[int] = 1
    placement: ClassVar[Literal["loop", "v"]] = "loop"


class GPipe(PipelineSchedule):
    """All forwards, then all backwards; one stage a rank."""

    kind: Literal["gpipe"] = "gpipe"


class OneFOneB(PipelineSchedule):
    """One forward, one backward; one stage a rank."""

    kind: Literal["one_f_one_b"] = "one_f_one_b"


class InterleavedOneFOneB(PipelineSchedule):
    """Interleaved 1F1B: `chunks` stages a rank, in a loop."""

    kind: Literal["interleaved"] = "interleaved"
    chunks: int = Field(default=2, ge=2)

    @property
    def stages_per_rank(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] - only read
        """Stages a rank."""
        return self.chunks


class VShape(PipelineSchedule):
    """1F1B on the V: an early and a late stage a rank, few activations."""

    kind: Literal["v_shape"] = "v_shape"
    stages_per_rank: ClassVar[int] = 2
    placement: ClassVar[Literal["loop", "v"]] = "v"


class ZeroBubbleH1(PipelineSchedule):
    """ZB-H1: split backward, weight gradients in the gaps; one stage a rank."""

    kind: Literal["zero_bubble_h1"] = "zero_bubble_h1"


class ZeroBubbleV(PipelineSchedule):
    """ZB-V: split backward on the V."""

    kind: Literal["zero_bubble_v"] = "zero_bubble_v"
    stages_per_rank: ClassVar[int] = 2
    placement: ClassVar[Literal["loop", "v"]] = "v"


class DualPipeV(PipelineSchedule):
    """DualPipeV: a forward of one chunk beside a backward of the other, on the V."""

    kind: Literal["dual_pipe_v"] = "dual_pipe_v"
    stages_per_rank: ClassVar[int] = 2
    placement: ClassVar[Literal["loop", "v"]] = "v"


class Searched(PipelineSchedule):
    """The order with the least bubble found under a cap, on the V, if all stages cost the same."""

    kind: Literal["search"] = "search"
    memory_cap: int | None = Field(
        default=None, ge=2, description="activations of a stage that a rank keeps; null = any"
    )
    backward: Literal["whole", "split"] = "whole"
    stages_per_rank: ClassVar[int] = 2
    placement: ClassVar[Literal["loop", "v"]] = "v"


PipelineScheduleConfig = Annotated[
    GPipe
    | OneFOneB
    | InterleavedOneFOneB
    | VShape
    | ZeroBubbleH1
    | ZeroBubbleV
    | DualPipeV
    | Searched,
    Field(discriminator="kind"),
]


class LayoutConfig(Config):
    """How the ranks divide the work: `data * context * pipeline = world`.

    The experts fold the same ranks another way: `expert` divides `data * context`.
    """

    data: int | None = Field(
        default=None, ge=1, description="data ranks; none = world / (context * pipeline)"
    )
    context: int = Field(default=1, ge=1, description="ranks that share each sequence")
    expert: int = Field(
        default=1, ge=1, description="ranks that share the experts, of `data * context`"
    )
    pipeline: int = Field(default=1, ge=1)
    schedule: PipelineScheduleConfig = OneFOneB()
    dispatcher: DispatcherConfig = AutoDispatcher()

    @model_validator(mode="after")
    def _words_agree(self) -> Self:
        kind = self.dispatcher.kind
        if kind == "local" and self.expert > 1:
            raise ValueError(
                f"dispatcher 'local' needs expert = 1, got expert = {self.expert}; "
                "use 'auto' or 'all_to_all'"
            )
        if kind in ("rowwise", "deepep") and self.expert == 1:
            raise ValueError(
                f"dispatcher {kind!r} needs expert >= 2, got expert = 1; use 'auto' or 'local'"
            )
        if self.pipeline == 1 and self.schedule.stages_per_rank > 1:
            raise ValueError(
                f"schedule {self.schedule.kind!r} needs pipeline >= 2, got pipeline = 1; use "
                "'one_f_one_b'"
            )
        return self

    def describe(self) -> str:
        """Return the sizes in a few words."""
        context = f" x context {self.context}" if self.context > 1 else ""
        return f"data {self.data}{context} x expert {self.expert} x pipeline {self.pipeline}"

    @property
    def num_stages(self) -> int:
        """Virtual pipeline stages."""
        return self.pipeline * self.schedule.stages_per_rank

    def rank_of_stage(self, stage: int) -> int:
        """Return the pipeline rank that holds a virtual stage."""
        turn, rank = divmod(stage, self.pipeline)
        runs_back = self.schedule.placement == "v" and turn % 2
        return self.pipeline - 1 - rank if runs_back else rank
