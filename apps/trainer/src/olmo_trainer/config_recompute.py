"""Which activations are computed again in the backward instead of kept."""

from typing import Annotated, Literal

from pydantic import Field

from olmo_trainer.config_node import Config, SplitWords


class NoRecompute(Config):
    """Keep every activation."""

    kind: Literal["none"] = "none"


class BlocksRecompute(Config):
    """Keep the input of a block and compute the rest of it again; all blocks, or chosen ones."""

    kind: Literal["blocks"] = "blocks"
    layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], SplitWords] = Field(
        default=(), description="global indices of the blocks; none = all"
    )


class ExpertsRecompute(Config):
    """Keep the rows that come to the experts and compute what is inside them again."""

    kind: Literal["experts"] = "experts"


RecomputeConfig = Annotated[
    NoRecompute | BlocksRecompute | ExpertsRecompute, Field(discriminator="kind")
]
