"""The configuration of a run: one pydantic model per strategy, checked before anything starts.

The tree is frozen and closed: an unknown key is an error. A recipe is a function returning one
(`recipes.py`); the command line changes single values with `--set a.b=c` (`overrides.py`). No torch
import here, so that a wrong value is answered at once.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Config(BaseModel):
    """Base of every node: immutable, no unknown keys, defaults checked too."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # a folder named 2024
    )


class AttentionConfig(Config):
    """Grouped-query attention with rotary positions and q/k norm; some layers may be sliding."""

    num_heads: int = Field(default=4, ge=1)
    num_kv_heads: int = Field(default=2, ge=1)
    head_dim: int = Field(default=32, ge=2, multiple_of=2)
    rope_theta: float = Field(default=10_000.0, gt=0)
    qk_norm: Literal["head", "projection"] = Field(
        default="head", description="head = each head for itself; projection = all heads as one"
    )
    window: int = Field(
        default=0, ge=0, description="positions a sliding layer sees, its own included; 0 = all"
    )
    full_every: int = Field(
        default=0, ge=0, description="every n-th layer sees all positions; 0 = none does"
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads})"
            )
        return self

    @model_validator(mode="after")
    def _windows_agree(self) -> Self:
        if self.full_every and not self.window:
            raise ValueError(
                f"full_every ({self.full_every}) needs a window; without one every layer sees all "
                "positions: set window, or full_every = 0"
            )
        if self.full_every == 1:
            raise ValueError("full_every = 1 leaves no layer sliding; set window = 0 instead")
        return self

    def window_of(self, layer: int) -> int:
        """Return the window of a layer by its global index from 0; 0 = all positions."""
        is_full = self.full_every and (layer + 1) % self.full_every == 0
        return 0 if is_full else self.window


class MoEConfig(Config):
    """A routed layer: `num_experts` experts, `top_k` a token, and perhaps one shared expert.

    The merge rule `mean_one` is the report's (section 21): weights `top_k * p` with `p`
    renormalised over the selected experts, so that each is 1 in the mean, as the shared expert is.
    """

    num_experts: int = Field(default=8, ge=1)
    top_k: int = Field(default=2, ge=1)
    expert_hidden: int = Field(default=128, ge=8, multiple_of=8)
    shared_hidden: int = Field(default=128, ge=0, multiple_of=8, description="0 = no shared expert")
    gate: Literal["softmax", "sigmoid"] = "softmax"
    route_weights: Literal["mean_one", "sum_one", "scores"] = Field(
        default="mean_one",
        description="of a token's experts: renormalised to mean 1 or to sum 1, or the plain scores",
    )
    balance_loss: float = Field(
        default=0.01, ge=0, description="coefficient of each layer's balance loss"
    )
    balance_scope: Literal["sequence", "microbatch"] = "sequence"
    z_loss: float = Field(
        default=2e-4, ge=0, description="coefficient of each layer's router z-loss"
    )
    bias_rate: float = Field(
        default=1e-3, ge=0, description="selection-bias step, 0 = no selection bias"
    )

    @model_validator(mode="after")
    def _top_k_fits(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k ({self.top_k}) must be at most num_experts ({self.num_experts})"
            )
        return self


class ModelConfig(Config):
    """A decoder: dense blocks first, then routed blocks, untied head; by default the report's."""

    vocab_size: int = Field(default=257, ge=2)
    d_model: int = Field(default=128, ge=8, multiple_of=8)
    num_layers: int = Field(default=4, ge=1)
    num_dense_layers: int = Field(default=1, ge=0)
    dense_hidden: int = Field(default=384, ge=8, multiple_of=8)
    norms: Literal["peri", "pre"] = Field(
        default="peri", description="peri = before and after each sublayer; pre = before it"
    )
    norm_eps: float = Field(default=1e-6, gt=0)
    attention: AttentionConfig = AttentionConfig()
    moe: MoEConfig = MoEConfig()

    @property
    def moe_layers(self) -> range:
        """Global indices of the routed layers."""
        return range(min(self.num_dense_layers, self.num_layers), self.num_layers)


class PrecisionConfig(Config):
    """What is computed in which format; main weights and moments are always FP32."""

    parameters: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="auto = bf16 on a GPU, fp32 on a CPU"
    )
    mxfp8: tuple[Literal["experts", "shared"], ...] = Field(
        default=(), description="layers whose products run in MXFP8"
    )

    @field_validator("mxfp8", mode="before")
    @classmethod
    def _split_words(cls, value: object) -> object:
        return [word for word in value.split(",") if word] if isinstance(value, str) else value


class StandardLibrarySource(Config):
    """The text of the Python standard library that came with the interpreter."""

    kind: Literal["standard_library"] = "standard_library"


class TextFolderSource(Config):
    """A folder of the user's own text files, a document each."""

    kind: Literal["text_folder"] = "text_folder"
    path: str = Field(min_length=1)
    pattern: str = Field(default="*.txt", min_length=1)


class TokenFilesSource(Config):
    """Token files: folders that `prepare` wrote, or OLMo-core's memory maps."""

    kind: Literal["token_files"] = "token_files"
    paths: tuple[str, ...] = Field(min_length=1, description="files, folders or patterns")
    dtype: Literal["auto", "uint16", "uint32"] = Field(
        default="auto", description="auto = what the manifest or the header says"
    )
    end_of_document: int | None = Field(
        default=None, ge=0, description="id that ends a document; none = what the manifest says"
    )
    check: Literal["all", "sampled"] = Field(
        default="all", description="how much of files without a manifest is read before training"
    )

    @field_validator("paths", mode="before")
    @classmethod
    def _split_words(cls, value: object) -> object:
        return [word for word in value.split(",") if word] if isinstance(value, str) else value


PlainSourceConfig = Annotated[
    StandardLibrarySource | TextFolderSource | TokenFilesSource, Field(discriminator="kind")
]


class IngredientConfig(Config):
    """A source of a mixture."""

    source: PlainSourceConfig
    weight: float = Field(default=1.0, gt=0, description="relative to the other sources'")
    max_passes: float | None = Field(
        default=None, gt=0, description="most times it is read; none = data.max_passes"
    )


class MixtureSource(Config):
    """Several sources, by name, each with a weight."""

    kind: Literal["mixture"] = "mixture"
    sources: dict[Annotated[str, Field(min_length=1)], IngredientConfig] = Field(min_length=1)


SourceConfig = Annotated[
    StandardLibrarySource | TextFolderSource | TokenFilesSource | MixtureSource,
    Field(discriminator="kind"),
]


class NoFilter(Config):
    """Train on every sequence."""

    kind: Literal["none"] = "none"


class RepeatsFilter(Config):
    """Leave out sequences in which a short pattern stands many times in a row."""

    kind: Literal["repeats"] = "repeats"
    max_period: int = Field(default=13, ge=1, description="longest pattern, in tokens")
    max_count: int = Field(default=32, ge=2, description="times in a row that are too many")


FilterConfig = Annotated[NoFilter | RepeatsFilter, Field(discriminator="kind")]


class DataConfig(Config):
    """Which text, and how it is held out and packed."""

    source: SourceConfig = StandardLibrarySource()
    max_passes: float | None = Field(
        default=None, gt=0, description="most times any text is read; none = without end"
    )
    attend: Literal["sequence", "document"] = Field(
        default="sequence", description="document = no token sees another document's"
    )
    filter: FilterConfig = NoFilter()
    sequence_length: int = Field(default=256, ge=2)
    heldout_fraction: float = Field(default=0.05, gt=0, lt=1)


class BatchConfig(Config):
    """A step's tokens. The global batch is the same under every layout."""

    sequences: int = Field(default=16, ge=1, description="sequences a step, over all ranks")
    accumulation: int = Field(default=1, ge=1, description="microbatches a data rank")


class AdamWConfig(Config):
    """AdamW with decoupled decay on matrices, gradient clipping, cosine schedule with warm-up."""

    learning_rate: float = Field(default=3e-3, gt=0)
    final_fraction: float = Field(
        default=0.1, ge=0, le=1, description="last over peak learning rate"
    )
    warmup_steps: int = Field(default=20, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)


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


class RunConfig(Config):
    """Where the run writes, and how often it logs, evaluates and saves."""

    folder: str | None = Field(default=None, min_length=1, description="none = runs/NAME/DATE-TIME")
    log_every: int = Field(default=20, ge=1)
    heldout_every: int = Field(default=100, ge=0, description="0 = only at the end")
    heldout_sequences: int = Field(
        default=128, ge=1, description="most sequences in one evaluation"
    )
    save_every: int = Field(default=200, ge=0, description="0 = only at the end")
    save_mode: Literal["background", "blocking"] = Field(
        default="background",
        description="background = train on while files are written, from a copy in host memory",
    )
    keep_last: int = Field(default=0, ge=0, description="newest checkpoints to keep; 0 = all")
    keep_every: int = Field(
        default=0, ge=0, description="steps whose checkpoints are kept beside them; 0 = none"
    )
    sample_bytes: int = Field(default=300, ge=0, description="continuation at the end, 0 = none")
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        default=(), description="where the numbers of metrics.jsonl are sent too"
    )
    watchdog_seconds: float = Field(
        default=600.0, ge=0, description="without progress that end the run; 0 = none do"
    )
    threads: int = Field(default=0, ge=0, description="CPU threads a rank; 0 = cores / local ranks")

    @field_validator("trackers", mode="before")
    @classmethod
    def _split_words(cls, value: object) -> object:
        return [word for word in value.split(",") if word] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _keeping_agrees(self) -> Self:
        if self.keep_every and not self.keep_last:
            raise ValueError(
                f"keep_every ({self.keep_every}) needs keep_last >= 1; with keep_last = 0 every "
                "checkpoint is kept"
            )
        if self.keep_every and (not self.save_every or self.keep_every % self.save_every):
            raise ValueError(
                f"keep_every ({self.keep_every}) must be a multiple of save_every "
                f"({self.save_every}), at least one"
            )
        return self


class TrainerConfig(Config):
    """Everything that decides a run."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    seed: int = Field(default=0, ge=0, lt=2**63)
    steps: int = Field(ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    model: ModelConfig = ModelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: AdamWConfig = AdamWConfig()
    layout: LayoutConfig = LayoutConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        model, moe, layout = self.model, self.model.moe, self.layout
        if model.moe_layers and moe.num_experts % layout.expert:
            raise ValueError(
                f"layout.expert ({layout.expert}) must divide model.moe.num_experts "
                f"({moe.num_experts})"
            )
        if model.num_layers < layout.num_stages:
            raise ValueError(
                f"model.num_layers ({model.num_layers}) must be at least the number of pipeline "
                f"stages, layout.pipeline * chunks ({layout.num_stages})"
            )
        if self.precision.mxfp8:
            self._mxfp8_fits()
        return self

    def _mxfp8_fits(self) -> None:
        widths = {"model.d_model": self.model.d_model}
        if "experts" in self.precision.mxfp8:
            widths["model.moe.expert_hidden"] = self.model.moe.expert_hidden
        if "shared" in self.precision.mxfp8:
            widths["model.moe.shared_hidden"] = self.model.moe.shared_hidden
        for key, width in widths.items():
            if width % 32:
                raise ValueError(f"{key} ({width}) must be a multiple of 32 for precision.mxfp8")

    def for_world(self, world: int) -> "TrainerConfig":
        """Fill in `layout.data` for `world` ranks; `ValueError` when the layout misses them."""
        layout = self.layout
        if world % layout.pipeline:
            raise ValueError(
                f"layout.pipeline ({layout.pipeline}) must divide the number of processes "
                f"({world}); "
                "start as many with torchrun --nproc-per-node, or --set layout.pipeline=1"
            )
        if world == 1 and layout.dispatcher == "all_to_all":
            raise ValueError(
                "layout.dispatcher = 'all_to_all' needs more than one process; use 'auto'"
            )
        data = layout.data or world // layout.pipeline
        if data * layout.pipeline != world:
            raise ValueError(
                f"layout.data ({data}) * layout.pipeline ({layout.pipeline}) must be the number of "
                f"processes ({world})"
            )
        if data % layout.expert:
            raise ValueError(
                f"layout.expert ({layout.expert}) must divide the data ranks, "
                f"world / pipeline ({data})"
            )
        share = data * self.batch.accumulation
        if self.batch.sequences % share:
            raise ValueError(
                f"batch.sequences ({self.batch.sequences}) must be a multiple of data ranks * "
                f"batch.accumulation ({data} * {self.batch.accumulation})"
            )
        return self.model_copy(update={"layout": layout.model_copy(update={"data": data})})
