"""Times of steps over all ranks, and of the actions of a stage alone."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from contenders import Contender, cut
from layers import SPLIT_RULES, ExpertLayer, Stage
from olmo_pipeline import Costs, PipelineExecutor, one_f_one_b, zero_bubble


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what was issued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_steps(
    contenders: Sequence[Contender], device: torch.device, warm_up: int, rounds: int
) -> dict[str, list[float]]:
    """Return each contender's step times in seconds: the slowest rank's, taken in turn."""
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(warm_up + rounds):
        for contender in contenders:
            wait_for(device)
            dist.barrier()
            started = time.perf_counter()
            contender.step()
            wait_for(device)
            taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device=device)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if turn >= warm_up:
                times[contender.name].append(taken.item())
    return times


def measure_costs(
    layers: Sequence[ExpertLayer], batch: Sequence[torch.Tensor], num_ranks: int, repeats: int
) -> dict[int, Costs]:
    """Return what the actions of one stage take in seconds, by the number of stages a rank.

    They are measured without any transfer, on every rank, and averaged over ranks and stages, since
    all stages do the same. F + B, and F + I + W, are the runs of one-rank schedules; F + I is one
    with frozen weights.
    """
    return {
        num_chunks: _costs_of(next(cut(layers, num_chunks)), batch, num_ranks, repeats)
        for num_chunks in (1, 2)
    }


def _costs_of(
    layers: list[ExpertLayer], batch: Sequence[torch.Tensor], num_ranks: int, repeats: int
) -> Costs:
    stage, device = Stage(layers, is_last=True), batch[0].device
    count = len(batch)
    leaves = [x.clone().requires_grad_() for x in batch]  # as a stage in the middle has them

    def forward() -> None:
        for leaf in leaves:
            stage(leaf, leaf)

    def runs(schedule) -> Callable[[], object]:
        function = {0: lambda hidden, x: stage(x, x)}
        executor = PipelineExecutor(
            schedule, function, device=device, dtype=leaves[0].dtype, split_rules=SPLIT_RULES
        )
        return lambda: executor.run(leaves, activation_shape=())

    whole, split = runs(one_f_one_b(1, count)), runs(zero_bubble(1, count))
    times = _medians({"F": forward, "FB": whole, "FIW": split}, device, repeats)
    for layer in layers:
        layer.requires_grad_(False)
    times |= _medians({"FI": whole}, device, repeats)
    for layer in layers:
        layer.requires_grad_(True)
    forward_time = times["F"]
    found = torch.tensor(
        [
            forward_time,
            times["FB"] - forward_time,
            times["FI"] - forward_time,
            times["FIW"] - times["FI"],
        ],
        dtype=torch.float64,
        device=device,
    )
    dist.all_reduce(found)
    # Of short actions a difference can come out below 0; none takes less than 10 microseconds.
    values = (found / (num_ranks * count)).clamp(min=1e-5).tolist()
    return Costs(
        forward=values[0],
        backward=values[1],
        input_gradient=values[2],
        weight_gradient=values[3],
    )


def _medians(
    calls: dict[str, Callable[[], object]], device: torch.device, repeats: int
) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 2):
        for name, call in calls.items():
            wait_for(device)
            started = time.perf_counter()
            call()
            wait_for(device)
            if turn >= 2:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in times.items()}
