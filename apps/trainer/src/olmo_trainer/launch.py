"""From a process to a mesh: the device, the process group, the threads.

`torchrun` says through the environment which process this is; without it the run has one process
and needs no process group.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec

import torch
import torch.distributed as dist

from olmo_trainer.config import TrainerConfig
from olmo_trainer.mesh import Mesh, create_mesh


def pick_device(config: TrainerConfig) -> torch.device:
    """Return this process's device; a GPU is used by itself when there is one.

    Raises:
        ValueError: `device = cuda` without a GPU for this process.
    """
    if config.layout.pipeline > 1 or config.optimizer.replicas.reduce == "in_backward":
        # Whoever loads a kernel behind a spinning transfer can hang: load all of them first.
        # CUDA reads this once, at its first call in the process.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    local_rank, available = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if config.device == "cpu" or (config.device == "auto" and not available):
        return torch.device("cpu")
    if local_rank >= available:
        raise ValueError(
            f"device = {config.device!r} needs a GPU for each process of this machine, got "
            f"{available} for local rank {local_rank}; start fewer processes or set device=cpu"
        )
    return torch.device("cuda", local_rank)


def check_kernels(config: TrainerConfig, device: torch.device) -> None:
    """Raise `ValueError` when this process cannot run the kernels that are asked for by name.

    Before any process group; `device` is what `pick_device` returns.
    """
    if config.optimizer.impl != "triton":
        return
    lacks = "device is a CPU" if device.type == "cpu" else ""
    if find_spec("triton") is None:
        lacks = "triton is not installed"
    if lacks:
        raise ValueError(
            f"optimizer.impl = 'triton' runs kernels on GPUs, but {lacks}; use optimizer.impl = "
            "'auto' or 'reference'"
        )


@contextmanager
def launched(config: TrainerConfig, device: torch.device) -> Iterator[Mesh]:
    """Join the run's processes and yield the mesh; leave them at the end."""
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(config.run.threads or max(1, (os.cpu_count() or 1) // local))
    store = None
    if distributed:
        store, rank, world = next(dist.rendezvous("env://"))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun keeps it over its restarts, with the addresses of processes that are gone.
            # Only there: machines that came at other times count their restarts apart.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"start-{attempt}", store)
        # The watchdog knows more than a collective that ran out of time: it comes first.
        patience = config.run.watchdog_seconds
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=20 * patience + 60) if patience else None,
        )
    try:
        yield create_mesh(config.layout, device, store=store)
    finally:
        if distributed:
            dist.destroy_process_group()
