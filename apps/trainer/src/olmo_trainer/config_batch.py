"""A step's tokens."""

from pydantic import Field

from olmo_trainer.config_node import Config


class BatchConfig(Config):
    """A step's tokens. The global batch is the same under every layout."""

    sequences: int = Field(default=16, ge=1, description="sequences a step, over all ranks")
    accumulation: int = Field(default=1, ge=1, description="microbatches a data rank")
