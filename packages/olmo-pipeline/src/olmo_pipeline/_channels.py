"""One communicator per direction between two ranks.

NCCL performs the operations of one communicator in the order in which they were issued. If both
directions between two ranks, or two neighbours, shared one, a send that waits for its receiver
would hold up the receive behind it, and two such ranks would wait for each other. With an own
communicator for every ordered pair, each carries one stream of messages and nothing waits that
need not.

`torch.distributed.new_group` is not used: it must be called by all processes of the job, or, with
`use_local_synchronization`, names the group after the number of groups that the caller has made so
far. Neighbours in a pipeline may have made different numbers (one more for a tied embedding, say)
and would wait under different names. Here the members build the communicator under a name that
they have agreed on, and processes outside the pipeline take no part.
"""

import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from ._agreement import gather_texts


class Channel:
    """Carries tensors from one rank to another, in order, without blocking the caller."""

    def __init__(
        self,
        name: str,
        *,
        is_source: bool,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        backend: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
        store = dist.PrefixStore(name, _get_default_store())
        self._group: Any = backend(store, 0 if is_source else 1, 2, timeout=timeout)
        # NCCL connects at the first message and blocks until the peer joins: do it here, where all
        # ranks open their channels in one order.
        first = torch.zeros(1, device=device)
        (self.send(first) if is_source else self.receive(first)).wait()

    def send(self, tensor: Tensor) -> dist.Work:
        """Start to send a contiguous tensor, which must stay untouched until the work is done."""
        return self._group.send([tensor], 1, 0)

    def receive(self, tensor: Tensor) -> dist.Work:
        """Start to receive into a contiguous tensor."""
        return self._group.recv([tensor], 0, 0)

    def close(self) -> None:
        """End the communicator after what is under way."""
        self._group.shutdown()

    def abort(self) -> None:
        """End the communicator at once, so that the peer need not wait for what will not come."""
        self._group.abort()


def open_channels(
    pairs: Sequence[tuple[int, int]],
    *,
    group: dist.ProcessGroup | None,
    agreement: str,
    device: torch.device,
    timeout: timedelta,
) -> dict[tuple[int, int], Channel]:
    """Open the channels of this rank. All ranks of `group` call it with the same arguments.

    Args:
        pairs: (source, destination) ranks within `group`, in the order in which to open them.
        group: The ranks of the pipeline; None for all processes.
        agreement: Text that must be the same on all ranks (the schedule and the dtype, say).
        device: CPU for gloo, CUDA for NCCL.
        timeout: How long an operation may wait for its peer.

    Returns:
        The channels in which this rank is source or destination.

    Raises:
        ValueError: On every rank, if two ranks bring different agreements.
    """
    rank = dist.get_rank(group)
    given = [
        text.split("\n", 1) for text in gather_texts(group, f"{uuid.uuid4().hex}\n{agreement}")
    ]
    for other, (_, text) in enumerate(given):
        if text != given[0][1]:
            raise ValueError(
                f"all ranks of a pipeline must bring the same arguments; "
                f"rank {other} has\n{text}\nand rank 0 has\n{given[0][1]}"
            )
    name = f"olmo_pipeline/{given[0][0]}"
    return {
        (source, destination): Channel(
            f"{name}/{source}-{destination}",
            is_source=rank == source,
            device=device,
            timeout=timeout,
        )
        for source, destination in pairs
        if rank in (source, destination)
    }
