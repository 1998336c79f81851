"""The configuration of a run: one pydantic model per strategy, checked before anything starts.

The tree is frozen and closed: an unknown key is an error. A recipe is a function returning one
(`recipes.py`); the command line changes single values with `--set a.b=c` (`overrides.py`). No torch
import here, so that a wrong value is answered at once. The `config_*.py` beside this module hold
the larger strategies; this one is where all of them are imported from.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from olmo_trainer.config_batch import BatchConfig as BatchConfig
from olmo_trainer.config_batch import LinearBatchWarmup as LinearBatchWarmup
from olmo_trainer.config_batch import NoBatchWarmup as NoBatchWarmup
from olmo_trainer.config_compile import CompileConfig as CompileConfig
from olmo_trainer.config_compile import DenseCompile as DenseCompile
from olmo_trainer.config_compile import NoCompile as NoCompile
from olmo_trainer.config_data import DataConfig as DataConfig
from olmo_trainer.config_data import IngredientConfig as IngredientConfig
from olmo_trainer.config_data import MixtureSource as MixtureSource
from olmo_trainer.config_data import NoFilter as NoFilter
from olmo_trainer.config_data import PlainSourceConfig as PlainSourceConfig
from olmo_trainer.config_data import RepeatsFilter as RepeatsFilter
from olmo_trainer.config_data import SourceConfig as SourceConfig
from olmo_trainer.config_data import StandardLibrarySource as StandardLibrarySource
from olmo_trainer.config_data import TextFolderSource as TextFolderSource
from olmo_trainer.config_data import TokenFilesSource as TokenFilesSource
from olmo_trainer.config_dispatcher import AllToAllDispatcher as AllToAllDispatcher
from olmo_trainer.config_dispatcher import AutoDispatcher as AutoDispatcher
from olmo_trainer.config_dispatcher import DeepEPDispatcher as DeepEPDispatcher
from olmo_trainer.config_dispatcher import LocalDispatcher as LocalDispatcher
from olmo_trainer.config_dispatcher import RowwiseDispatcher as RowwiseDispatcher
from olmo_trainer.config_guard import GuardConfig as GuardConfig
from olmo_trainer.config_guard import SkipGuard as SkipGuard
from olmo_trainer.config_guard import StopGuard as StopGuard
from olmo_trainer.config_layout import DualPipeV as DualPipeV
from olmo_trainer.config_layout import GPipe as GPipe
from olmo_trainer.config_layout import InterleavedOneFOneB as InterleavedOneFOneB
from olmo_trainer.config_layout import LayoutConfig as LayoutConfig
from olmo_trainer.config_layout import OneFOneB as OneFOneB
from olmo_trainer.config_layout import Searched as Searched
from olmo_trainer.config_layout import VShape as VShape
from olmo_trainer.config_layout import ZeroBubbleH1 as ZeroBubbleH1
from olmo_trainer.config_layout import ZeroBubbleV as ZeroBubbleV
from olmo_trainer.config_learning_rate import CosineSchedule as CosineSchedule
from olmo_trainer.config_learning_rate import LinearSchedule as LinearSchedule
from olmo_trainer.config_learning_rate import ScheduleConfig as ScheduleConfig
from olmo_trainer.config_learning_rate import WSDSchedule as WSDSchedule
from olmo_trainer.config_node import Config as Config
from olmo_trainer.config_node import SplitWords
from olmo_trainer.config_optimizer import AdamWConfig as AdamWConfig
from olmo_trainer.config_optimizer import MuonConfig as MuonConfig
from olmo_trainer.config_optimizer import OptimizerConfig as OptimizerConfig
from olmo_trainer.config_precision import PrecisionConfig as PrecisionConfig
from olmo_trainer.config_precision import RecipeConfig as RecipeConfig
from olmo_trainer.config_recompute import BlocksRecompute as BlocksRecompute
from olmo_trainer.config_recompute import ExpertsRecompute as ExpertsRecompute
from olmo_trainer.config_recompute import NoRecompute as NoRecompute
from olmo_trainer.config_recompute import RecomputeConfig as RecomputeConfig
from olmo_trainer.config_rerun import DropsRerun as DropsRerun
from olmo_trainer.config_rerun import NoRerun as NoRerun
from olmo_trainer.config_rerun import RerunConfig as RerunConfig


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


class LossConfig(Config):
    """What is optimised beside the cross entropy, but for the routers' losses (`model.moe`)."""

    z_loss: float = Field(
        default=0.0, ge=0, description="coefficient of the head's z-loss, mean of logsumexp^2"
    )


class RunConfig(Config):
    """Where the run writes, and how often it logs, evaluates and saves."""

    folder: str | None = Field(default=None, min_length=1, description="none = runs/NAME/DATE-TIME")
    log_every: int = Field(default=20, ge=1)
    layers_every: int = Field(
        default=1, ge=1, description="steps between two that write the numbers of each layer"
    )
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
    sample_parameters: int = Field(
        default=100_000_000,
        ge=1,
        description="most of a model that the end samples from: one CPU holds it in FP32",
    )
    trackers: Annotated[tuple[Literal["tensorboard", "wandb"], ...], SplitWords] = Field(
        default=(), description="where the numbers of metrics.jsonl are sent too"
    )
    watchdog_seconds: float = Field(
        default=600.0, ge=0, description="without progress that end the run; 0 = none do"
    )
    threads: int = Field(default=0, ge=0, description="CPU threads a rank; 0 = cores / local ranks")

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

    name: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")
    seed: int = Field(default=0, ge=0, lt=2**63)
    steps: int = Field(ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    model: ModelConfig = ModelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    recompute: RecomputeConfig = NoRecompute()
    compile: CompileConfig = NoCompile()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = AdamWConfig()
    schedule: ScheduleConfig = CosineSchedule()
    guard: GuardConfig = StopGuard()
    rerun: RerunConfig = NoRerun()
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
                f"stages, layout.pipeline * stages a rank ({layout.num_stages})"
            )
        if layout.context > 1:
            self._context_fits()
        if self.precision.mxfp8:
            self._mxfp8_fits()
        self._recompute_fits()
        if self.precision.saved == "mxfp8":
            self._saved_fits()
        if layout.dispatcher.kind == "deepep":
            self._deepep_fits()
        if self.optimizer.impl == "triton" and self.device == "cpu":
            raise ValueError(
                "optimizer.impl = 'triton' runs kernels on GPUs, got device = 'cpu'; use "
                "optimizer.impl = 'auto' or 'reference'"
            )
        if isinstance(self.rerun, DropsRerun):
            self._rerun_fits(self.rerun)
        return self

    def _context_fits(self) -> None:
        """Each context rank holds as many positions, and for attention as many heads, as others."""
        context, attention = self.layout.context, self.model.attention
        if self.data.sequence_length % context:
            raise ValueError(
                f"layout.context ({context}) must divide data.sequence_length "
                f"({self.data.sequence_length})"
            )
        heads, shared = attention.num_heads, attention.num_kv_heads
        # Several ranks may hold the same key/value head.
        if heads % context or (shared % context and context % shared):
            raise ValueError(
                f"layout.context ({context}) must divide model.attention.num_heads ({heads}), and "
                f"divide num_kv_heads ({shared}) or be a multiple of it; lower layout.context"
            )

    @property
    def recomputed_layers(self) -> frozenset[int]:
        """Global indices of the blocks that are computed again in the backward."""
        if not isinstance(self.recompute, BlocksRecompute):
            return frozenset()
        return frozenset(self.recompute.layers or range(self.model.num_layers))

    def _recompute_fits(self) -> None:
        missing = sorted(each for each in self.recomputed_layers if each >= self.model.num_layers)
        if missing:
            raise ValueError(
                f"recompute.layers names {missing}; the model has layers 0 to "
                f"{self.model.num_layers - 1}"
            )
        if isinstance(self.recompute, ExpertsRecompute) and not self.model.moe_layers:
            raise ValueError("recompute 'experts' needs a routed layer, and the model has none")

    def _saved_fits(self) -> None:
        kept = set(self.model.moe_layers) - self.recomputed_layers
        if not kept or isinstance(self.recompute, ExpertsRecompute):
            raise ValueError(
                "precision.saved = 'mxfp8' packs what routed experts keep, and with recompute.kind "
                f"= {self.recompute.kind!r} this model's keep nothing; use 'high', or recompute "
                "fewer layers"
            )
        moe = self.model.moe
        for key, width in (
            ("model.d_model", self.model.d_model),
            ("model.moe.expert_hidden", moe.expert_hidden),
        ):
            if width % 32:
                raise ValueError(f"{key} ({width}) must be a multiple of 32 for precision.saved")

    def _deepep_fits(self) -> None:
        if self.model.d_model % 256 or self.model.moe.top_k > 32:
            raise ValueError(
                f"layout.dispatcher 'deepep' needs model.d_model ({self.model.d_model}) a multiple "
                f"of 256 and model.moe.top_k ({self.model.moe.top_k}) at most 32; use 'all_to_all'"
            )
        if self.precision.parameters == "fp32" or self.device == "cpu":
            raise ValueError(
                "layout.dispatcher 'deepep' moves BF16 between GPUs, got precision.parameters = "
                f"{self.precision.parameters!r} and device = {self.device!r}; use 'all_to_all'"
            )

    @property
    def worst_capacity_factor(self) -> float:
        """A capacity factor from which on nothing is dropped.

        Every token of an expert group sends all the routes that it can to one rank.
        """
        moe, num_ranks = self.model.moe, self.layout.expert
        return num_ranks * min(moe.top_k, moe.num_experts // num_ranks) / moe.top_k

    def _rerun_fits(self, rerun: DropsRerun) -> None:
        if not self.model.moe_layers:
            raise ValueError("rerun.kind = 'drops' needs a routed layer, and the model has none")
        chosen = self.layout.dispatcher
        first = chosen.capacity_factor if isinstance(chosen, RowwiseDispatcher) else None
        if first is None:
            raise ValueError(
                "rerun.kind = 'drops' needs layout.dispatcher.kind = 'rowwise' with a "
                f"capacity_factor, got kind = {chosen.kind!r} without one, which drops nothing; "
                "set layout.dispatcher.capacity_factor, or rerun.kind = 'none'"
            )
        if rerun.most_capacity_factor is not None and rerun.most_capacity_factor <= first:
            raise ValueError(
                f"rerun.most_capacity_factor ({rerun.most_capacity_factor}) must be above "
                f"layout.dispatcher.capacity_factor ({first}), from where buffers grow"
            )

    def _mxfp8_fits(self) -> None:
        model, moe, attention = self.model, self.model.moe, self.model.attention
        widths = {"model.d_model": model.d_model}
        if "experts" in self.precision.mxfp8:
            widths["model.moe.expert_hidden"] = moe.expert_hidden if model.moe_layers else 0
        if "shared" in self.precision.mxfp8:
            widths["model.moe.shared_hidden"] = moe.shared_hidden if model.moe_layers else 0
        if "attention" in self.precision.mxfp8:
            for name in ("num_heads", "num_kv_heads"):
                heads = f"model.attention.{name} * head_dim"
                widths[heads] = getattr(attention, name) * attention.head_dim
        for key, width in widths.items():
            if not width:
                raise ValueError(
                    f"precision.mxfp8 ({','.join(self.precision.mxfp8)}) names layers that the "
                    f"model does not have: {key.rpartition('.')[2]} is 0 or no layer is routed"
                )
            if width % self.precision.recipe.granularity:
                raise ValueError(
                    f"{key} ({width}) must be a multiple of {self.precision.recipe.granularity}, "
                    "precision.recipe.granularity, for precision.mxfp8"
                )

    def unreached(self) -> list[str]:
        """Return what of the configuration never happens, in words: legal, and seldom meant."""
        words, schedule, warmup = [], self.schedule, self.batch.warmup
        if schedule.warmup_steps >= self.steps:
            peak = self.optimizer.learning_rate
            words.append(
                f"schedule.warmup_steps ({schedule.warmup_steps}) leaves none of {self.steps} "
                "steps: the learning rate only rises, to "
                f"{peak * self.steps / schedule.warmup_steps:.2e} of {peak:.2e}"
            )
        if isinstance(warmup, LinearBatchWarmup) and warmup.steps >= self.steps:
            words.append(
                f"batch.warmup.steps ({warmup.steps}) leaves none of {self.steps} steps: none has "
                f"the whole batch of {self.batch.sequences} sequences"
            )
        dispatcher, worst = self.layout.dispatcher, self.worst_capacity_factor
        if isinstance(dispatcher, RowwiseDispatcher) and isinstance(self.rerun, DropsRerun):
            factor = dispatcher.capacity_factor
            if factor is not None and factor >= worst:
                words.append(
                    f"layout.dispatcher.capacity_factor ({factor}) is no less than the worst case "
                    f"({worst:.4g}): nothing is dropped, and rerun.kind = 'drops' has nothing to do"
                )
        return words

    def for_world(self, world: int) -> "TrainerConfig":
        """Fill in `layout.data` for `world` ranks; `ValueError` when the layout misses them."""
        layout = self.layout
        if world % layout.pipeline:
            raise ValueError(
                f"layout.pipeline ({layout.pipeline}) must divide the number of processes "
                f"({world}); "
                "start as many with torchrun --nproc-per-node, or --set layout.pipeline=1"
            )
        if world // layout.pipeline % layout.context:
            raise ValueError(
                f"layout.context ({layout.context}) must divide the ranks of a pipeline stage, "
                f"world / pipeline ({world // layout.pipeline}); start as many with torchrun "
                "--nproc-per-node, or --set layout.context=1"
            )
        if world == 1 and layout.dispatcher.kind == "all_to_all":
            raise ValueError(
                "layout.dispatcher = 'all_to_all' needs more than one process; use 'auto'"
            )
        data = layout.data or world // (layout.pipeline * layout.context)
        if data * layout.context * layout.pipeline != world:
            raise ValueError(
                f"layout.data ({data}) * layout.context ({layout.context}) * layout.pipeline "
                f"({layout.pipeline}) must be the number of processes ({world}); leave layout.data "
                "out (null), or start as many"
            )
        if data * layout.context % layout.expert:
            raise ValueError(
                f"layout.expert ({layout.expert}) must divide the ranks of a pipeline stage, "
                f"data * context ({data} * {layout.context}); start as many with torchrun "
                "--nproc-per-node, or --set layout.expert=1"
            )
        share = data * self.batch.accumulation
        if self.batch.sequences % share:
            raise ValueError(
                f"batch.sequences ({self.batch.sequences}) must be a multiple of data ranks * "
                f"batch.accumulation ({data} * {self.batch.accumulation}); as --set "
                f"batch.sequences={-(-self.batch.sequences // share) * share}"
            )
        self.batch.check_microbatches()
        return self.model_copy(update={"layout": layout.model_copy(update={"data": data})})
