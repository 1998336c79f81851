"""What is computed in which format; main weights are always FP32."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from olmo_trainer.config_node import Config, SplitWords

Quantised = Literal["experts", "shared", "attention"]


class RecipeConfig(Config):
    """How layers multiply in MXFP8: what `olmo_mxfp8.MXRecipe` says, for all layers alike."""

    element: Literal["e4m3", "e5m2"] = Field(
        default="e4m3", description="format of activations and weights"
    )
    grad_element: Literal["e4m3", "e5m2"] = Field(
        default="e4m3", description="format of the gradients of outputs"
    )
    scale_rule: Literal["rceil", "floor"] = Field(
        default="rceil", description="rceil never saturates; floor is the OCP specification's"
    )
    granularity: Literal[32, 128] = Field(
        default=32, description="values that share a scale; 128 is what Hopper's units multiply"
    )
    input_grad: Literal["mxfp8", "high"] = "mxfp8"
    weight_grad: Literal["high", "mxfp8"] = "high"


class PrecisionConfig(Config):
    """Parameters, and the products in MXFP8."""

    parameters: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="auto = bf16 on a GPU, fp32 on a CPU"
    )
    mxfp8: Annotated[tuple[Quantised, ...], SplitWords] = Field(
        default=(), description="layers whose products run in MXFP8; attention = its projections"
    )
    recipe: RecipeConfig = RecipeConfig()
    saved: Literal["high", "mxfp8"] = Field(
        default="high",
        description="what routed experts keep for their backward: as it is, or in MXFP8",
    )

    @model_validator(mode="after")
    def _recipe_is_used(self) -> Self:
        if not self.mxfp8 and self.recipe != RecipeConfig():
            raise ValueError(
                "recipe says how layers multiply in MXFP8, and mxfp8 names none; set "
                "mxfp8=experts,shared,attention or some of them"
            )
        return self
