"""Step time of every schedule beside torch.distributed.pipelining, on two or more devices.

torchrun --standalone --nproc-per-node 2 packages/olmo-pipeline/benchmarks/step_time
torchrun --standalone --nproc-per-node 2 packages/olmo-pipeline/benchmarks/step_time --dry-run

A dry run is on gloo and CPU with a tiny model: its numbers mean nothing.
It prints a Markdown report and, with `--out FILE`, writes it. Every contender uses the same layers;
steps are timed in turn; a step is what the slowest rank takes from a barrier to its device's end.
"""

import argparse
import os
import platform
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent.parent / "src"))
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # a stage must not load behind a transfer

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from contenders import all_contenders  # noqa: E402
from layers import SHAPES, ExpertLayer, Shape  # noqa: E402
from table import costs_of, table_of  # noqa: E402
from timing import measure_costs, time_steps  # noqa: E402


def main() -> None:
    """Measure, print, write."""
    options = _options()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu" if options.dry_run else f"cuda:{os.environ['LOCAL_RANK']}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    shape = SHAPES["dry" if options.dry_run else "full"]
    report = measure(rank, num_ranks, device, shape, options.rounds)
    if rank == 0:
        print(report, flush=True)
        if options.out is not None:
            options.out.write_text(report + "\n")
    dist.destroy_process_group()


def measure(rank: int, num_ranks: int, device: torch.device, shape: Shape, rounds: int) -> str:
    """Return the report; torch.distributed is initialised."""
    if shape.num_layers % (2 * num_ranks):
        raise ValueError(
            f"the {shape.num_layers} layers must make two equal stages a rank, got {num_ranks} "
            f"ranks; take a divisor of {shape.num_layers // 2}."
        )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(rank)
    layers = [ExpertLayer(shape, device, dtype) for _ in range(shape.num_layers // num_ranks)]
    batch = [
        torch.randn(shape.tokens, shape.d_model, device=device, dtype=dtype)
        for _ in range(shape.num_microbatches)
    ]
    costs = measure_costs(layers, batch, num_ranks, rounds)
    # The costs are the same on all ranks, so a search finds one schedule everywhere.
    contenders = list(all_contenders(shape, layers, batch, costs, rank, num_ranks))
    times = time_steps(contenders, device, warm_up=3, rounds=rounds)
    table = table_of(contenders, times, costs)
    for contender in contenders:
        contender.close()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, dry run"
    return "\n\n".join(
        [
            f"# Step time on {num_ranks} x {where}",
            f"torch {torch.__version__}, Python {platform.python_version()}; {dtype}, {shape}; "
            f"{rounds} rounds after 3 to warm up, in turn; median (least to most).",
            costs_of(costs),
            table,
        ]
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Step time of pipeline schedules.")
    parser.add_argument("--dry-run", action="store_true", help="gloo on CPU with a tiny model")
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each contender")
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
