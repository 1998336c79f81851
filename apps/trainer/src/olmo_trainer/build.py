"""Configuration and mesh to the parts of a run: model, dispatcher, reducer, optimizer, executor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from olmo_distopt import (
    DecayPolicy,
    GradientReducer,
    Location,
    ReplicaGroups,
    ShardedAdamW,
    ShardedMuon,
)
from olmo_ep_comm import Dispatched, Dispatcher
from olmo_experts_gemm import Experts
from olmo_mxfp8 import MXExperts, MXLinear, MXPacker, MXRecipe
from olmo_pipeline import PipelineExecutor
from olmo_routing import Router, SelectionBias
from torch import nn

from olmo_trainer.compiler import build_regions
from olmo_trainer.config import (
    DropsRerun,
    ExpertsRecompute,
    MuonConfig,
    SkipGuard,
    TrainerConfig,
)
from olmo_trainer.dispatcher import build_dispatcher, live_dispatches
from olmo_trainer.growing_dispatcher import GrowingDispatcher
from olmo_trainer.growing_executor import GrowingExecutor
from olmo_trainer.guard import Breaker, Guard
from olmo_trainer.mesh import Mesh
from olmo_trainer.model.attention import Attention
from olmo_trainer.model.block import Block
from olmo_trainer.model.context_exchange import ContextExchange
from olmo_trainer.model.feed_forward import FeedForward
from olmo_trainer.model.initialize import initialize
from olmo_trainer.model.moe import MoE
from olmo_trainer.model.regions import EAGER, Regions
from olmo_trainer.model.transformer import Transformer
from olmo_trainer.pipeline_schedule import build_schedule, leave_weight_gradients, split_rules
from olmo_trainer.rerun import StepRerun
from olmo_trainer.sizes import stage_layers
from olmo_trainer.stage import Stage
from olmo_trainer.statistics import StepStatistics
from olmo_trainer.weight_caches import WeightCaches

Optimizer = ShardedAdamW | ShardedMuon
Rebuilt = Callable[[Sequence[tuple[str, nn.Parameter]]], None]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Assembly:
    """Everything one rank trains with."""

    config: TrainerConfig
    mesh: Mesh
    dtype: torch.dtype
    stages: dict[int, Stage]
    statistics: StepStatistics
    replica_groups: ReplicaGroups
    reducer: GradientReducer
    optimizer: Optimizer
    guard: Guard | None
    rerun: StepRerun | None
    breaker: Breaker
    executor: GrowingExecutor
    dispatcher: Dispatcher

    @property
    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This rank's parameters by global name."""
        return [pair for stage in self.stages.values() for pair in stage.part.named_parameters()]

    @property
    def selection_biases(self) -> dict[int, SelectionBias]:
        """The selection bias of each routed layer held here, by global layer index."""
        return {
            layer: bias
            for stage in self.stages.values()
            for layer, bias in stage.part.selection_biases.items()
        }

    def close(self) -> None:
        """End what holds on to other ranks; collective, before the process group ends."""
        close = getattr(self.dispatcher, "close", None)  # of DeepEP alone
        if close is not None:
            close()


def precision_of(config: TrainerConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of the parameters: `auto` is BF16 on a GPU and FP32 elsewhere."""
    word = config.precision.parameters
    if word == "auto":
        word = "bf16" if device.type == "cuda" else "fp32"
    return DTYPES[word]


def build_part(
    config: TrainerConfig,
    layers: range,
    dispatcher: Dispatcher | None,
    *,
    num_expert_ranks: int,
    count_dispatched: Callable[[int, Dispatched], None] | None = None,
    exchange: ContextExchange | None = None,
    regions: Regions = EAGER,
) -> Transformer:
    """Return layers `layers` of the model on the CPU in FP32, not yet initialised.

    `count_dispatched` is told a layer's index and what was dispatched: see `MoE`. `regions` are the
    dense stretches, of `build_regions` or as they stand.
    """
    model, moe, mxfp8 = config.model, config.model.moe, config.precision.mxfp8
    recipe = MXRecipe(**config.precision.recipe.model_dump())

    def quantise(layer: nn.Module, *names: str) -> None:
        for name in names:
            linear = layer.get_submodule(name)
            assert isinstance(linear, nn.Linear), "what is quantised here are linear layers"
            setattr(layer, name, MXLinear.from_linear(linear, recipe))

    def shared() -> nn.Module | None:
        if not moe.shared_hidden:
            return None
        layer = FeedForward(model.d_model, moe.shared_hidden)
        if "shared" in mxfp8:
            quantise(layer, "gate_up", "down")
        return layer

    def attention(index: int) -> Attention:
        window = model.attention.window_of(index)
        layer = Attention(
            model.d_model, model.attention, model.norm_eps, window=window, exchange=exchange
        )
        if "attention" in mxfp8:
            quantise(layer, "query", "key", "value", "out")
        return layer

    def routed(index: int) -> MoE:
        if dispatcher is None:
            raise ValueError("a routed layer needs a dispatcher")
        router = Router(
            model.d_model,
            moe.num_experts,
            moe.top_k,
            gate=moe.gate,
            renormalize=moe.route_weights != "scores",
            route_scale=float(moe.top_k) if moe.route_weights == "mean_one" else 1.0,
            selection_bias=(
                SelectionBias(moe.num_experts, moe.bias_rate) if moe.bias_rate else None
            ),
        )
        sizes = (moe.num_experts // num_expert_ranks, model.d_model, moe.expert_hidden)
        # A recomputed block keeps its input alone: packing would round what is used at once.
        packs = config.precision.saved == "mxfp8" and index not in config.recomputed_layers
        own = replace(recipe, saved="mxfp8" if packs else "high")
        experts = MXExperts(*sizes, recipe=own) if "experts" in mxfp8 else Experts(*sizes)
        return MoE(
            router,
            dispatcher,
            experts,
            shared(),
            pack=MXPacker() if packs else None,  # pyright: ignore[reportArgumentType] - it unpacks what it packed
            recompute_experts=isinstance(config.recompute, ExpertsRecompute),
            count_dispatched=(
                None if count_dispatched is None else partial(count_dispatched, index)
            ),
            regions=regions,
        )

    def block(index: int) -> Block:
        is_routed = index in model.moe_layers
        return Block(
            model.d_model,
            model.norm_eps,
            attention(index),
            routed(index) if is_routed else FeedForward(model.d_model, model.dense_hidden),
            norms=model.norms,
            regions=regions,
        )

    num_context = 1 if exchange is None else exchange.num_ranks
    return Transformer(
        model,
        layers,
        block,
        recomputed=config.recomputed_layers,
        num_context=num_context,
        regions=regions,
    )


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to the routed experts, which expert ranks share out."""
    return ".experts." in name


def build_optimizer(
    config: TrainerConfig,
    named: list[tuple[str, nn.Parameter]],
    groups: ReplicaGroups,
    *,
    first_expert: int,
    after_rebuild: Rebuilt | None = None,
) -> Optimizer:
    """Return the optimizer of these parameters; collective over the groups.

    Args:
        config: The run.
        named: Parameters held here, by global name.
        groups: Who holds replicas of them.
        first_expert: Global index of the first expert held here.
        after_rebuild: Told of parameters that have new values.
    """
    chosen = config.optimizer
    make = ShardedAdamW
    if isinstance(chosen, MuonConfig):
        make = partial(
            ShardedMuon,
            momentum=chosen.momentum,
            nesterov=chosen.momentum_form == "nesterov",
            num_iterations=chosen.iterations,
            scale=chosen.scale,
            product_dtype=DTYPES[chosen.products],
        )
    return make(
        named,
        groups,
        lr=chosen.learning_rate,
        betas=(chosen.beta1, chosen.beta2),
        eps=chosen.epsilon,
        weight_decay=chosen.weight_decay,
        decay=DecayPolicy(
            embeddings="embedding" in chosen.decay, routers="routers" in chosen.decay
        ),
        moment_dtype=DTYPES[chosen.moments],
        impl=chosen.impl,
        locations={
            name: Location((config.model.moe.num_experts, *parameter.shape[1:]), first_expert)
            for name, parameter in named
            if is_expert(name)
        },
        after_rebuild=after_rebuild,
    )


def _build_rerun(config: TrainerConfig, dispatcher: Dispatcher) -> StepRerun | None:
    if not isinstance(config.rerun, DropsRerun):
        return None
    assert isinstance(dispatcher, GrowingDispatcher), "the configuration was checked: it has room"
    return StepRerun(config.rerun, dispatcher)


def assemble(config: TrainerConfig, mesh: Mesh) -> Assembly:
    """Build this rank's parts. Collective: every rank of the mesh calls it.

    `config` must have passed `for_world`.
    """
    dtype = precision_of(config, mesh.device)
    context_group = mesh.context_group if mesh.num_context > 1 else None
    exchange = None if context_group is None else ContextExchange(context_group)
    schedule = build_schedule(config.layout, config.batch.accumulation)
    dispatcher = build_dispatcher(
        config,
        mesh,
        dtype=dtype,
        live_forwards=live_dispatches(config, schedule, mesh.pipeline),
    )
    statistics = StepStatistics(config.model, mesh.device)
    num_local = config.model.moe.num_experts // mesh.num_expert
    first_expert = mesh.expert * num_local
    regions = build_regions(config)
    parts, stages = stage_layers(config), {}
    for index in schedule.stages_of(mesh.pipeline):
        part = build_part(
            config,
            parts[index],
            dispatcher,
            num_expert_ranks=mesh.num_expert,
            count_dispatched=partial(
                statistics.add_dispatched, local_experts=dispatcher.local_experts
            ),
            exchange=exchange,
            regions=regions,
        )
        initialize(part, config.seed, first_expert=first_expert)
        stages[index] = Stage(
            part.to(mesh.device),
            config.model.moe,
            statistics,
            head_z_loss=config.loss.z_loss,
            context_group=context_group,
        )
    named = [pair for stage in stages.values() for pair in stage.part.named_parameters()]
    groups = ReplicaGroups(
        {"dense": mesh.dense_replica_group, "experts": mesh.expert_replica_group},
        lambda name, _: "experts" if is_expert(name) else "dense",
    )
    caches = WeightCaches()
    optimizer = build_optimizer(
        config, named, groups, first_expert=first_expert, after_rebuild=caches.refresh
    )
    # After the optimizer took its FP32 main weights, so that they keep every bit of the start.
    for stage in stages.values():
        caches.make(stage.to(dtype).part)
    replicas = config.optimizer.replicas
    if replicas.gather == "in_forward":
        optimizer.overlap_gather(
            block for stage in stages.values() for block in stage.part.layers.values()
        )
    executor = GrowingExecutor(
        lambda count: PipelineExecutor(
            build_schedule(config.layout, count),
            stages,
            group=mesh.pipeline_group,
            device=mesh.device,
            dtype=dtype,
            split_rules=split_rules(config),
        ),
        config.batch.accumulation,
    )
    if schedule.splits_backward:
        for stage in stages.values():
            leave_weight_gradients(stage.part, executor.defer, config)
    return Assembly(
        config=config,
        mesh=mesh,
        dtype=dtype,
        stages=stages,
        statistics=statistics,
        replica_groups=groups,
        reducer=GradientReducer(
            named,
            groups,
            collective=replicas.collective,
            overlap=replicas.reduce == "in_backward",
            impl=config.optimizer.impl,
        ),
        optimizer=optimizer,
        guard=Guard(config.guard, mesh) if isinstance(config.guard, SkipGuard) else None,
        rerun=_build_rerun(config, dispatcher),
        breaker=Breaker(),
        executor=executor,
        dispatcher=dispatcher,
    )
