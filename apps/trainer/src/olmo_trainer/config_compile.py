"""Which parts of the model `torch.compile` makes code of."""

from typing import Annotated, Literal

from pydantic import Field

from olmo_trainer.config_node import Config


class NoCompile(Config):
    """Every operation by itself."""

    kind: Literal["none"] = "none"


class DenseCompile(Config):
    """Norms, projections, rotary positions, dense layers, shared experts, residuals, the loss.

    Attention's mixing, routing, dispatch and routed experts stay operations of their own.
    """

    kind: Literal["dense"] = "dense"
    backend: Literal["inductor", "aot_eager"] = Field(
        default="inductor",
        description="aot_eager = the same graphs of torch's own operations, to look for a fault",
    )


CompileConfig = Annotated[NoCompile | DenseCompile, Field(discriminator="kind")]
