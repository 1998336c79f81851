"""What is computed in which format; main weights are always FP32."""

from typing import Annotated, Literal

from pydantic import Field

from olmo_trainer.config_node import Config, SplitWords


class PrecisionConfig(Config):
    """Parameters, and the products in MXFP8."""

    parameters: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="auto = bf16 on a GPU, fp32 on a CPU"
    )
    mxfp8: Annotated[tuple[Literal["experts", "shared"], ...], SplitWords] = Field(
        default=(), description="layers whose products run in MXFP8"
    )
