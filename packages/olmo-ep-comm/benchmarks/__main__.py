"""Measure the exchanges between GPUs and write a dated report.

torchrun --nproc-per-node 2 packages/olmo-ep-comm/benchmarks [--quick] [--out DIR]
python packages/olmo-ep-comm/benchmarks --dry-run        # one CPU process: buffers and no speed
"""

import argparse
import contextlib
import datetime
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

import cells as c  # noqa: E402
import metadata  # noqa: E402
import programs  # noqa: E402
from olmo_ep_comm import rowwise_buffer_bytes  # noqa: E402

TIMEOUT = datetime.timedelta(minutes=3)


def main() -> int:
    """Run what the command line asks for; 1 when a part broke or disagreed."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 repeats, not 50")
    parser.add_argument("--out", type=Path, default=HERE / "reports", help="folder of the report")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU: no real numbers")
    options = parser.parse_args()
    is_launched = "RANK" in os.environ
    if not options.dry_run and not (is_launched and torch.cuda.device_count() > 1):
        parser.error("this needs two GPUs under `torchrun --nproc-per-node 2`; or use --dry-run")
    device = torch.device("cpu")
    if not options.dry_run:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if is_launched:
        dist.init_process_group("gloo" if options.dry_run else "nccl", timeout=TIMEOUT)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return _run(options, device)
    finally:
        dist.destroy_process_group()


def _run(options: argparse.Namespace, device: torch.device) -> int:
    repeats = 2 if options.dry_run else 10 if options.quick else 50
    lines, failures = [], []
    for name, cells in _parts(options.dry_run, device, repeats):
        try:
            for cell in cells:
                lines += list(_rows(cell))
        except Exception as error:
            if dist.get_world_size() > 1:
                raise  # the other ranks wait in a collective
            failures.append(f"- {name}: {type(error).__name__}: {error}"[:300])
    if dist.get_rank() == 0:
        text = "\n".join([*_head(device, repeats), *lines, "", *failures]) + "\n"
        print(text)
        options.out.mkdir(parents=True, exist_ok=True)
        day = datetime.datetime.now(datetime.UTC).date()
        stem = f"exchange_{_hardware(device)}_{day}".replace(" ", "-").lower()
        taken = len(list(options.out.glob(f"{stem}*.md")))  # an older report is never overwritten
        (options.out / f"{stem}{f'-{taken + 1}' if taken else ''}.md").write_text(text)
    return int(bool(failures))


def _parts(dry: bool, device: torch.device, repeats: int) -> Iterator[tuple[str, Iterator[c.Cell]]]:
    shapes = c.TINY if dry else c.SHAPES
    for shape in shapes:
        yield f"layers, {shape}", c.layers(shape, device, repeats)
        yield f"thin rows, {shape}", metadata.thin_rows(shape, device, repeats)
        yield f"plan, {shape}", metadata.plan(shape, device, repeats)
    yield "pairs", c.pairs(shapes[-1], device, repeats)
    yield "grouped product", programs.product_alone(shapes[-1], device, repeats)
    if not dry:
        yield "ceilings", c.ceiling(device, repeats)
        yield "programs", programs.over_the_link(shapes[-1], device, repeats)
        yield "own memory", programs.in_own_memory(shapes[-1], device, repeats)


def _head(device: torch.device, repeats: int) -> Iterator[str]:
    describe = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = ""
    with contextlib.suppress(OSError):  # git may be absent
        commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout
    yield f"# olmo-ep-comm on {dist.get_world_size()} x {_hardware(device)}"
    yield ""
    yield "Milliseconds, medians of the slowest rank with [least..most]. `wire` is what leaves a"
    yield "rank, in bytes and bytes a second, to be held against the link; `logical` is what its"
    yield "experts get, most of it local or copied, and says nothing about the link."
    yield ""
    yield f"- command: `{shlex.join(['benchmarks', *sys.argv[1:]])}`"
    yield f"- date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M UTC}"
    versions = f"torch {torch.__version__}, triton {version('triton')}"
    yield f"- commit: {commit.strip() or 'unknown'}; {versions}; {repeats} repeats"
    yield ""
    yield from _buffers()
    yield ""
    yield "| what | contender | ms | wire MB | wire GB/s | logical GB/s |"
    yield "|---|---|---|---|---|---|"


def _buffers() -> Iterator[str]:
    """Say what a dropless dispatcher of two ranks allocates at the shapes that are measured."""
    yield "| shape, 2 ranks, bfloat16, dropless, one live forward | buffers of a rank, MiB |"
    yield "|---|---|"
    for shape in c.SHAPES:
        sizes = rowwise_buffer_bytes(
            num_ranks=2, num_experts=shape.E, max_tokens=shape.T, width=shape.D, top_k=shape.K
        )
        parts = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in sizes.items())
        yield f"| {shape} | {sum(sizes.values()) / 2**20:.0f}: {parts} |"


def _rows(cell: c.Cell) -> Iterator[str]:
    for name, times in cell.samples.items():
        median = statistics.median(times)
        wire = cell.wire.get(name, 0)
        numbers = (
            f"{median:.3f} [{min(times):.3f}..{max(times):.3f}]",
            f"{wire / 1e6:.1f}" if wire else "-",
            f"{wire / median / 1e6:.1f}" if wire else "-",
            f"{cell.logical / median / 1e6:.1f}" if cell.logical else "-",
        )
        yield f"| {cell.what} | {name} | {' | '.join(numbers)} |"


def _hardware(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU dry run"


if __name__ == "__main__":
    sys.exit(main())
