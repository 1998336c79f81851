"""The dispatcher that a layout names, with buffers for what one microbatch can bring."""

import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from olmo_ep_comm import Dispatcher, create_dispatcher, rowwise_buffer_bytes
from olmo_pipeline import Schedule
from olmo_routing import admit

from olmo_trainer.config import (
    AutoDispatcher,
    DeepEPDispatcher,
    DropsRerun,
    RowwiseDispatcher,
    TrainerConfig,
)
from olmo_trainer.growing_dispatcher import GrowingDispatcher
from olmo_trainer.mesh import Mesh
from olmo_trainer.pipeline_schedule import build_schedule
from olmo_trainer.sizes import stage_layers


def check_installed(config: TrainerConfig) -> None:
    """Raise `ValueError` when the dispatcher's library is not here; before any process group."""
    if isinstance(config.layout.dispatcher, DeepEPDispatcher) and find_spec("deep_ep") is None:
        raise ValueError(
            "layout.dispatcher.kind = 'deepep' needs DeepEP v2 and there is no module deep_ep; "
            "install https://github.com/deepseek-ai/DeepEP, or use 'all_to_all' or 'rowwise'"
        )


def live_dispatches(config: TrainerConfig, schedule: Schedule, rank: int) -> int:
    """Return the most dispatches of a pipeline rank whose backward is still to come, at least 1.

    A recomputed block lets go of its first dispatch at the end of its forward; its second is there
    during its backward alone.
    """
    layers, moe = stage_layers(config), set(config.model.moe_layers)
    kept = moe - config.recomputed_layers
    live = sum(
        schedule.max_live_per_stage[stage] * sum(layer in kept for layer in layers[stage])
        for stage in schedule.stages_of(rank)
    )
    passing = 2 if moe & config.recomputed_layers else 0
    return max(1, live + passing)


def build_dispatcher(
    config: TrainerConfig, mesh: Mesh, *, dtype: torch.dtype, live_forwards: int
) -> Dispatcher:
    """Return the dispatcher that the layout names. Collective over the expert group.

    Args:
        config: The run.
        mesh: Who shares the experts.
        dtype: Of tokens and rows.
        live_forwards: Dispatches whose backward may still be to come: see `live_dispatches`.

    Raises:
        ValueError: The library that the dispatcher needs is not here, or refuses to work.
    """
    chosen, moe = config.layout.dispatcher, config.model.moe
    kind = chosen.kind
    if isinstance(chosen, AutoDispatcher):
        kind = "local" if mesh.num_expert == 1 else "all_to_all"
    if kind == "local":
        return create_dispatcher("local", num_experts=moe.num_experts)
    sizes = _sizes(config, mesh.num_data, mesh.num_context)
    options: dict[str, object] = {}
    if isinstance(chosen, RowwiseDispatcher):
        options = {
            **sizes,
            "dtype": dtype,
            "live_forwards": live_forwards,
            "timeout_s": chosen.timeout_s,
        }
    elif isinstance(chosen, DeepEPDispatcher):
        options = {
            **sizes,
            "cpu_timeout_s": chosen.cpu_timeout_s,
            "gpu_timeout_s": chosen.gpu_timeout_s,
        }

    def make(**capacity: object) -> Dispatcher:
        try:
            return create_dispatcher(
                kind,
                num_experts=moe.num_experts,
                group=mesh.expert_group,
                **options,
                **capacity,
            )
        except RuntimeError as error:
            raise ValueError(f"layout.dispatcher.kind = {kind!r}: {error}") from error

    if isinstance(chosen, RowwiseDispatcher) and chosen.capacity_factor is not None:
        even = _even_rows(sizes)
        return _with_capacity(config, chosen, chosen.capacity_factor, even, make)
    return make()


def buffer_bytes(config: TrainerConfig, *, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of each buffer of a rowwise dispatcher, of the pipeline rank with the most.

    Empty for the others, which allocate what each dispatch brings. `config` must have passed
    `for_world`. Buffers that a rerun made larger are not foreseen.
    """
    chosen, layout, moe = config.layout.dispatcher, config.layout, config.model.moe
    if not isinstance(chosen, RowwiseDispatcher) or not config.model.moe_layers:
        return {}
    schedule = build_schedule(layout, config.batch.accumulation)
    sizes = _sizes(config, layout.data or 1, layout.context)
    capacity = None
    if chosen.capacity_factor is not None:
        factor = min(chosen.capacity_factor, config.worst_capacity_factor)
        capacity = math.ceil(factor * _even_rows(sizes))
    ranks = range(layout.pipeline)
    return rowwise_buffer_bytes(
        num_ranks=layout.expert,
        num_experts=moe.num_experts,
        dtype=dtype,
        capacity=capacity,
        live_forwards=max(live_dispatches(config, schedule, rank) for rank in ranks),
        **sizes,
    )


def _sizes(config: TrainerConfig, num_data: int, num_context: int) -> dict[str, int]:
    """Return what a microbatch can bring to a rank."""
    sequences = config.batch.sequences // (num_data * config.batch.accumulation)
    return {
        "max_tokens": sequences * config.data.sequence_length // num_context,
        "width": config.model.d_model,
        "top_k": config.model.moe.top_k,
    }


def _even_rows(sizes: dict[str, int]) -> int:
    """Return the rows of an even load, where a rank receives as many as its tokens have routes."""
    return sizes["max_tokens"] * sizes["top_k"]


def _with_capacity(
    config: TrainerConfig,
    chosen: RowwiseDispatcher,
    factor: float,
    even: int,
    make: Callable[..., Dispatcher],
) -> Dispatcher:
    """Return the dispatcher of `factor` times the `even` rows, one that grows where steps may."""

    def of_factor(factor: float) -> Dispatcher:
        return make(capacity=math.ceil(factor * even), admit=partial(admit, policy=chosen.drop))

    worst = config.worst_capacity_factor
    factor = min(factor, worst)  # more rows would never be filled
    if not isinstance(config.rerun, DropsRerun):
        return of_factor(factor)
    return GrowingDispatcher(
        of_factor, factor, most=min(worst, config.rerun.most_capacity_factor or worst)
    )
