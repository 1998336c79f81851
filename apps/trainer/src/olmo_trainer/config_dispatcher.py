"""How rows travel between tokens and their experts."""

from typing import Annotated, Literal

from pydantic import Field

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

    Between GPUs of one NVLink domain, or processes of one host. Nothing is dropped: a receive
    buffer holds the worst case, and there is one for each routed layer and live microbatch.
    """

    kind: Literal["rowwise"] = "rowwise"
    timeout_s: float = Field(
        default=300.0, gt=0, description="a GPU waits so long for another; longer than a save"
    )


class DeepEPDispatcher(Config):
    """DeepEP v2, where it is installed: GPUs, BF16."""

    kind: Literal["deepep"] = "deepep"
    cpu_timeout_s: int = Field(default=300, ge=1)
    gpu_timeout_s: int = Field(default=100, ge=1, description="longer than a save")


DispatcherConfig = Annotated[
    AutoDispatcher | LocalDispatcher | AllToAllDispatcher | RowwiseDispatcher | DeepEPDispatcher,
    Field(discriminator="kind"),
]
