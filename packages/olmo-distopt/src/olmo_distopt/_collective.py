"""Sums over a group of processes that need not hold any tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def is_together() -> bool:
    """Say whether there is a default group to take part in."""
    return dist.is_available() and dist.is_initialized()


def collective_device(tensors: Sequence[torch.Tensor], group: ProcessGroup | None) -> torch.device:
    """Return where this process's part of a collective lies.

    Args:
        tensors: what it is computed from; the first one's device. May be empty: then where the
            group's backend wants it.
        group: None for the default group.
    """
    if tensors:
        return tensors[0].device
    if is_together() and "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
