"""How weights move: AdamW, or Muon for the matrices between the embedding and the head."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from olmo_trainer.config_node import Config, SplitWords

MOST_BF16_BETA = 1 - 2**-8  # above it a BF16 moment can round back to where it was


class ReplicasConfig(Config):
    """How replicas of a parameter exchange gradients and weights; no word changes a number."""

    collective: Literal["all_reduce", "reduce_scatter"] = Field(
        default="all_reduce",
        description="of gradients; reduce_scatter = half the traffic, for adamw",
    )
    reduce: Literal["after_backward", "in_backward"] = Field(
        default="after_backward",
        description="in_backward = a bucket's sum starts with its last gradient of the step",
    )
    gather: Literal["after_step", "in_forward"] = Field(
        default="after_step",
        description="in_forward = of a block, new weights are waited for where it is next used",
    )


class ElementwiseConfig(Config):
    """What every optimizer here has: AdamW for some tensors at least, decay, clipping, the rate."""

    learning_rate: float = Field(default=3e-3, gt=0, description="its peak")
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    decay: Annotated[tuple[Literal["embedding", "routers"], ...], SplitWords] = Field(
        default=("routers",),
        description="what decays besides all other matrices; norms and biases never do",
    )
    moments: Literal["fp32", "bf16"] = Field(
        default="fp32", description="bf16 = half the bytes of moments and momentum"
    )
    max_grad_norm: float = Field(default=1.0, gt=0)
    impl: Literal["auto", "reference", "triton"] = Field(
        default="auto",
        description="what adds up gradients and moves weights: plain torch, or kernels on GPUs; "
        "auto = as olmo-distopt chooses",
    )
    replicas: ReplicasConfig = ReplicasConfig()

    @model_validator(mode="after")
    def _moments_hold_the_betas(self) -> Self:
        self._require_held("beta1", self.beta1)
        self._require_held("beta2", self.beta2)
        return self

    def _require_held(self, name: str, beta: float) -> None:
        if self.moments == "bf16" and beta > MOST_BF16_BETA:
            raise ValueError(
                f"{name} ({beta}) must be at most {MOST_BF16_BETA} with moments = 'bf16', "
                "whose 8 bits cannot hold smaller changes; use moments = 'fp32'"
            )


class AdamWConfig(ElementwiseConfig):
    """AdamW with decoupled decay, for every tensor."""

    kind: Literal["adamw"] = "adamw"


class MuonConfig(ElementwiseConfig):
    """Muon for hidden matrices and the matrices of each expert, AdamW for the rest."""

    kind: Literal["muon"] = "muon"
    momentum: float = Field(default=0.95, ge=0, lt=1)
    momentum_form: Literal["nesterov", "plain"] = "nesterov"
    iterations: int = Field(default=5, ge=1, description="Newton-Schulz iterations")
    scale: Literal["adamw_rms", "shape"] = Field(
        default="adamw_rms",
        description="of an update: as large as AdamW's, so that one rate suits both, or "
        "sqrt(max(1, rows / columns))",
    )
    products: Literal["bf16", "fp32"] = Field(
        default="bf16", description="dtype of the Newton-Schulz products"
    )

    @model_validator(mode="after")
    def _moments_hold_the_momentum(self) -> Self:
        self._require_held("momentum", self.momentum)
        return self

    @model_validator(mode="after")
    def _owners_have_the_sum(self) -> Self:
        if self.replicas.collective == "reduce_scatter":
            raise ValueError(
                "replicas.collective = 'reduce_scatter' needs kind = 'adamw', got 'muon', of which "
                "one replica needs the whole sum of a matrix; use 'all_reduce'"
            )
        return self


OptimizerConfig = Annotated[AdamWConfig | MuonConfig, Field(discriminator="kind")]
