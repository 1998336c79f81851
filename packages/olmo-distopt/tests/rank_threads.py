"""Ranks as threads of this process: groups of more ranks than there are worker processes.

Starting a process costs the import of torch, a thread costs nothing. Collectives are those that
torch's own tests use for threads; there is no overlap, and a sum is made in rank order.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class RankThreads:
    """The interface of the fixture `processes`, for as many ranks as one likes."""

    def run(self, function: Callable[..., Any], *arguments: Any, world: int) -> list[Any]:
        """Return `function(rank, world, *arguments)` of every rank, in rank order."""
        from torch.testing._internal.distributed import multi_threaded_pg as threaded

        results: list[Any] = [None] * world
        errors: dict[int, BaseException] = {}
        store = dist.HashStore()

        def one_rank(rank: int) -> None:
            c10d.init_process_group("threaded", rank=rank, world_size=world, store=store)
            try:
                results[rank] = function(rank, world, *arguments)
            except BaseException as error:
                errors[rank] = error
                threaded.ProcessLocalGroup.exception_handle(error)  # the others wait no longer

        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        threaded._install_threaded_pg()
        try:
            threads = [threading.Thread(target=one_rank, args=(rank,)) for rank in range(world)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            threaded.ProcessLocalGroup.reset()
            threaded._uninstall_threaded_pg()
            torch._C._distributed_c10d._set_thread_isolation_mode(False)
        for error in errors.values():
            if not isinstance(error, SystemExit):  # which ends a rank that waited
                raise error
        return results


@pytest.fixture(scope="session")
def threads() -> RankThreads:
    """Ranks that are threads."""
    return RankThreads()
