"""What the ranks of a pipeline tell each other when they build something together.

`torch.distributed.all_gather_object` is not used: it needs numpy, which torch does not bring.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


@contextmanager
def refusing_together(group: dist.ProcessGroup | None, *, alone: bool) -> Iterator[None]:
    """Within, what this rank refuses is refused by all ranks, so that none waits for it later.

    Args:
        group: The ranks of the pipeline; None for all processes.
        alone: Whether the pipeline is this process, which then asks nobody.

    Raises:
        ValueError: If another rank refused its arguments and this one did not.
    """
    fault: Exception | None = None
    try:
        yield
    except Exception as error:
        fault = error
    faulty: list[int] = []
    is_member = dist.is_available() and dist.is_initialized() and dist.get_rank(group) >= 0
    if is_member and not alone:
        flags = _gather(group, torch.tensor([fault is not None], dtype=torch.int64))
        faulty = [rank for rank, flag in enumerate(flags) if flag.item()]
    if fault is not None:
        raise fault
    if faulty:
        raise ValueError(
            f"all ranks of a pipeline must bring valid arguments; rank(s) {faulty} refused theirs, "
            f"read the error there."
        )


def gather_texts(group: dist.ProcessGroup | None, text: str) -> list[str]:
    """Return the text of every rank, in rank order."""
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8)
    lengths = [n.item() for n in _gather(group, torch.tensor([len(mine)], dtype=torch.int64))]
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
    padded[: len(mine)] = mine
    every = _gather(group, padded)
    return [
        bytes(given[: int(n)].tolist()).decode() for given, n in zip(every, lengths, strict=True)
    ]


def _gather(group: dist.ProcessGroup | None, mine: Tensor) -> list[Tensor]:
    """Gather CPU tensors of one shape, through the GPU where the group has NCCL alone."""
    if "cpu:" not in dist.get_backend_config(group):
        mine = mine.to(torch.device("cuda", torch.cuda.current_device()))
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return [given.cpu() for given in every]
