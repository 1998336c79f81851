"""How rows travel between tokens and their experts."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from olmo_trainer.config_node import Config


class AutoDispatcher(Config):
    """`local` when one rank holds all experts, else `all_to_all`."""

    kind: Literal["auto"] = "auto"


class LocalDispatcher(Config):
    """Every expert in each process: nothing travels."""

    kind: Literal["local"] = "local"


class AllToAllDispatcher(Config):
    """Uneven all-to-alls, over gloo or NCCL; the host waits once a dispatch."""

    kind: Literal["all_to_all"] = "all_to_all"


class RowwiseDispatcher(Config):
    """One-sided writes into the memory of the other ranks, each token once a rank.

    Between GPUs of one NVLink domain, or processes of one host. There is a receive buffer for each
    routed layer and live microbatch. It holds the worst case, or `capacity_factor` times the rows
    that come when the load is even: then it may be too small, and routes that find no room are
    dropped and counted.
    """

    kind: Literal["rowwise"] = "rowwise"
    capacity_factor: float | None = Field(
        default=None, gt=0, description="none = the worst case, nothing is ever dropped"
    )
    drop: Literal["fair", "tail"] = Field(
        default="fair", description="of every cell in proportion, or of the highest experts first"
    )
    timeout_s: float = Field(
        default=300.0, ge=0.001, description="a GPU waits so long for another; longer than a save"
    )

    @model_validator(mode="after")
    def _drops_need_a_capacity(self) -> Self:
        if self.drop != "fair" and self.capacity_factor is None:
            raise ValueError(
                "drop = 'tail' needs a capacity_factor; without one nothing is dropped"
            )
        return self


class DeepEPDispatcher(Config):
    """DeepEP v2, where it is installed: GPUs, BF16."""

    kind: Literal["deepep"] = "deepep"
    cpu_timeout_s: int = Field(default=300, ge=1)
    gpu_timeout_s: int = Field(default=100, ge=1, description="longer than a save")


DispatcherConfig = Annotated[
    AutoDispatcher | LocalDispatcher | AllToAllDispatcher | RowwiseDispatcher | DeepEPDispatcher,
    Field(discriminator="kind"),
]
