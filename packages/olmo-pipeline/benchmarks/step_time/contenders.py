"""One training step under each schedule, ours and torch's, on the same layers.

A rank keeps as many layers as one device needs and uses them for whichever stages a schedule gives
it: placements differ, work and memory do not.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from layers import SPLIT_RULES, ExpertLayer, Shape, Stage, loss_of
from olmo_pipeline import (
    Costs,
    PipelineExecutor,
    Schedule,
    dual_pipe_v,
    interleaved_one_f_one_b,
    one_f_one_b,
    search,
    v_shape,
    zero_bubble,
)
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B


class Contender(NamedTuple):
    """A step to time; `schedule` is None for the peer's."""

    name: str
    schedule: Schedule | None
    step: Callable[[], object]
    close: Callable[[], None]


def schedules(num_ranks: int, count: int, costs: dict[int, Costs]) -> dict[str, Schedule]:
    """Return ours by name; `costs` are those of a stage by the number of stages a rank."""
    memory_cap = 2 * num_ranks
    return {
        "1f1b": one_f_one_b(num_ranks, count),
        "interleaved": interleaved_one_f_one_b(num_ranks, count, 2),
        "v_shape": v_shape(num_ranks, count),
        "search, whole": search(num_ranks, count, memory_cap=memory_cap, costs=costs[2]),
        "zero_bubble h1": zero_bubble(num_ranks, count, "h1"),
        "zero_bubble v": zero_bubble(num_ranks, count, "v"),
        "search, split": search(
            num_ranks, count, memory_cap=memory_cap, costs=costs[2], split_backward=True
        ),
        "dual_pipe_v": dual_pipe_v(num_ranks, count),
    }


def cut(layers: Sequence[ExpertLayer], num_chunks: int) -> Iterator[list[ExpertLayer]]:
    """Yield the layers of each chunk of a rank."""
    size = len(layers) // num_chunks
    for first in range(0, len(layers), size):
        yield list(layers[first : first + size])


def our_contender(
    name: str,
    schedule: Schedule,
    layers: Sequence[ExpertLayer],
    batch: Sequence[torch.Tensor],
    rank: int,
) -> Contender:
    """Our executor on one schedule."""
    held = schedule.stages_of(rank)
    last = schedule.num_stages - 1
    stages = {
        stage: Stage(part, is_last=stage == last)
        for stage, part in zip(held, cut(layers, len(held)), strict=True)
    }
    executor = PipelineExecutor(
        schedule,
        stages,
        device=batch[0].device,
        dtype=batch[0].dtype,
        split_rules=SPLIT_RULES,
    )
    shape = batch[0].shape
    return Contender(
        name, schedule, lambda: executor.run(batch, activation_shape=shape), executor.close
    )


class _TheirStage(torch.nn.Sequential):
    """Layers as the peer calls them."""


def their_contender(
    layers: Sequence[ExpertLayer],
    batch: Sequence[torch.Tensor],
    rank: int,
    num_ranks: int,
    num_chunks: int,
) -> Contender:
    """torch.distributed.pipelining on 1F1B or interleaved 1F1B."""
    num_stages = num_ranks * num_chunks
    stages = [
        PipelineStage(_TheirStage(*part), rank + chunk * num_ranks, num_stages, batch[0].device)
        for chunk, part in enumerate(cut(layers, num_chunks))
    ]
    options = {"n_microbatches": len(batch), "loss_fn": loss_of, "scale_grads": False}
    schedule = (
        Schedule1F1B(stages[0], **options)
        if num_chunks == 1
        else ScheduleInterleaved1F1B(stages, **options)
    )
    whole = torch.cat(list(batch))

    def step() -> None:
        arguments = (whole,) if rank == 0 else ()
        if rank == num_ranks - 1:
            schedule.step(*arguments, target=whole, losses=[])
        else:
            schedule.step(*arguments)

    name = "torch 1f1b" if num_chunks == 1 else "torch interleaved"
    return Contender(name, None, step, lambda: None)


def all_contenders(
    shape: Shape,
    layers: Sequence[ExpertLayer],
    batch: Sequence[torch.Tensor],
    costs: dict[int, Costs],
    rank: int,
    num_ranks: int,
) -> Iterator[Contender]:
    """Yield every contender; all ranks call it alike."""
    for num_chunks in (1, 2):
        yield their_contender(layers, batch, rank, num_ranks, num_chunks)
    for name, schedule in schedules(num_ranks, shape.num_microbatches, costs).items():
        yield our_contender(name, schedule, layers, batch, rank)
