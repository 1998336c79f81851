"""Which receive buffers are still read by a forward that is alive.

The rows of a dispatch are its receive buffer, not a copy, and the experts save them for their
backward. A lease keeps the buffer from being written again. It is held by a tensor without values
that the autograd node of the dispatch saves, so that it ends exactly when autograd lets go of what
the node saved: after its backward, or when the graph is dropped without one. Activation
checkpointing, which drops what a first forward saves and saves that of the second, moves the lease
in the same way.
"""

import gc
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor


class LeasePool:
    """Leases of `num_leases` receive buffers, the lowest free one first."""

    def __init__(self, num_leases: int) -> None:
        self._num_leases = num_leases
        self._taken: set[int] = set()
        self._lock = threading.Lock()  # autograd ends leases from a thread of its own

    def take(self) -> tuple[int, Tensor, Callable[[], object]]:
        """Return a free buffer, the tensor whose end frees it, and a call that frees it sooner.

        Raises:
            RuntimeError: If none is free.
        """
        if not self.num_free:
            gc.collect()  # a graph in a cycle holds its leases until it is collected
        with self._lock:
            free = [index for index in range(self._num_leases) if index not in self._taken]
            if not free:
                raise RuntimeError(
                    f"`live_forwards` must be at least the number of dispatches whose backward is "
                    f"still to come, got {self._num_leases}, and all of them are alive; make the "
                    "dispatcher with more, run backward before the next dispatch, or dispatch "
                    "under `torch.no_grad()` and drop the handle."
                )
            self._taken.add(free[0])
        holder = torch.empty(0)
        return free[0], holder, weakref.finalize(holder, self._end, free[0])

    @property
    def num_free(self) -> int:
        """Buffers that no forward holds."""
        return self._num_leases - len(self._taken)

    def _end(self, index: int) -> None:
        # Without the lock, which `take` may hold when the collector runs inside of it.
        self._taken.discard(index)
