"""The ranks that share the experts."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


def resolve_group(group: dist.ProcessGroup | None, backend: str) -> dist.ProcessGroup:
    """Return `group` or the default group, of which this process is a member.

    Raises:
        RuntimeError: If there is no default group; `backend` is the class that needs one.
        ValueError: If this process is not in `group`.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                f"`{backend}` needs a process group and there is no default group; call "
                "`torch.distributed.init_process_group` first (run under torchrun), pass `group`, "
                "or use `LocalDispatcher` in a single process."
            )
        return dist.group.WORLD  # pyright: ignore[reportReturnType] - set once initialised
    if dist.get_rank(group) < 0:
        raise ValueError(
            "`group` must contain this process, got a group without it; make the dispatcher only "
            "on the group's ranks."
        )
    return group


def share_of_experts(num_experts: int, group: dist.ProcessGroup) -> range:
    """Return this rank's experts: rank r of n owns [r*E/n, (r+1)*E/n).

    Raises:
        ValueError: If the experts do not divide over the group.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if num_experts % num_ranks:
        raise ValueError(
            f"`num_experts` must be a multiple of the size of `group`, {num_ranks}, "
            f"got {num_experts}."
        )
    share = num_experts // num_ranks
    return range(rank * share, (rank + 1) * share)


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return this process's device in `group`: its current GPU with NCCL, the CPU without."""
    if "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def check_not_capturing(backend: str) -> None:
    """Raise while a CUDA graph is being captured, where buffers cannot be made.

    Raises:
        RuntimeError: If it is; `backend` is the class that would be made.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"`{backend}` must be made outside of a CUDA graph: it registers memory with every "
            "rank; make it before the capture begins."
        )


@contextmanager
def refusing_together(group: dist.ProcessGroup) -> Iterator[None]:
    """Within, what this rank refuses is refused by all ranks, so that none waits for it later.

    Raises:
        ValueError: If another rank refused its arguments and this one did not.
    """
    fault: Exception | None = None
    try:
        yield
    except Exception as error:
        fault = error
    faulty = [rank for rank, flag in enumerate(_gather(group, [fault is not None])) if flag[0]]
    if fault is not None:
        raise fault
    if faulty:
        raise ValueError(
            f"A dispatcher must be made with valid arguments on every rank of the group, but its "
            f"rank(s) {faulty} refused theirs; read the error there."
        )


def agree(group: dist.ProcessGroup, **numbers: int) -> None:
    """Raise on every rank unless all ranks give the same numbers, which fix places in memory.

    Raises:
        ValueError: If they differ.
    """
    given = _gather(group, list(numbers.values()))
    if any(value != given[0] for value in given):
        names = ", ".join(f"`{name}`" for name in numbers)
        raise ValueError(
            f"{names} must be the same on every rank of the group, got {given} in rank order."
        )


def _gather(group: dist.ProcessGroup, numbers: list[int]) -> list[list[int]]:
    mine = torch.tensor(numbers, dtype=torch.int64, device=device_of(group))
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return [value.tolist() for value in every]
