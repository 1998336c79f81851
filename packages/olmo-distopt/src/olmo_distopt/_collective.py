"""Collectives by their names in this torch, and what processes without tensors need for them."""

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


def start_gather(received: torch.Tensor, sent: torch.Tensor, group: ProcessGroup) -> dist.Work:
    """Start to gather every process's line `sent`, one after the other, in the line `received`."""
    work = _gather_lines(received, sent, group=group, async_op=True)
    assert work is not None, "a member of the group has work"
    return work


def start_scatter(received: torch.Tensor, sent: torch.Tensor, group: ProcessGroup) -> dist.Work:
    """Start to sum the lines `sent`; each process receives its own part, in rank order."""
    work = _scatter_sum(received, sent, group=group, async_op=True)
    assert work is not None, "a member of the group has work"
    return work


if hasattr(dist, "all_gather_single"):  # torch 2.14, which warns of the older names
    _gather_lines = dist.all_gather_single  # pyright: ignore[reportAttributeAccessIssue] # absent before
    _scatter_sum = dist.reduce_scatter_single  # pyright: ignore[reportAttributeAccessIssue] # absent before
elif dist.is_available():
    _gather_lines = dist.all_gather_into_tensor
    _scatter_sum = dist.reduce_scatter_tensor
