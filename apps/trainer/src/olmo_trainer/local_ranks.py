"""Run a function as several local processes joined by gloo: what `verify` compares layouts with.

The processes are forked from a server that has imported torch once, where the platform has fork; on
others each starts afresh.
"""

import multiprocessing
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

_LEAVE_SECONDS = 5.0


def run_local_ranks(
    function: Callable[..., Any], world: int, *arguments: Any, timeout: float = 600.0
) -> list[Any]:
    """Return `function(*arguments)` of each of `world` processes, in rank order.

    Inside, torch.distributed is initialised with gloo (for one process it is not), on one thread.

    Raises:
        RuntimeError: A process failed (with its traceback) or did not answer in `timeout` seconds.
    """
    context: Any = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
    context.set_forkserver_preload([function.__module__, __name__])
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            context.Process(
                target=_serve,
                args=(pipes[rank][1], f"{folder}/store", rank, world, function, arguments),
                daemon=True,
            )
            for rank in range(world)
        ]
        for process, (_, sender) in zip(ranks, pipes, strict=True):
            process.start()
            sender.close()
        try:
            answers = _collect([receiver for receiver, _ in pipes], timeout)
            for process in ranks:  # who ends by itself gives back what the machine lent it
                process.join(_LEAVE_SECONDS)
            return answers
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _collect(receivers: list[Connection], timeout: float) -> list[Any]:
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while waiting := [rank for rank in range(len(receivers)) if rank not in {*answers, *failures}]:
        # A rank that fails takes the others with it within moments: hear them too, but briefly.
        ready = wait([receivers[rank] for rank in waiting], 2.0 if failures else timeout)
        if not ready and not failures:
            raise RuntimeError(f"local ranks {waiting} did not answer within {timeout} s")
        if not ready:
            break
        for rank in (each for each in waiting if receivers[each] in ready):
            try:
                succeeded, value = pickle.loads(receivers[rank].recv_bytes())
            except EOFError:
                succeeded, value = False, "died without an answer"
            (answers if succeeded else failures)[rank] = value
    if failures:
        each = "\n".join(f"local rank {rank} failed: {failures[rank]}" for rank in sorted(failures))
        raise RuntimeError(each)
    return [answers[rank] for rank in range(len(receivers))]


def _serve(
    sender: Connection,
    store: str,
    rank: int,
    world: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        if world > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world
            )
        answer = (True, function(*arguments))
        if world > 1:
            dist.barrier()
    except BaseException:
        answer = (False, traceback.format_exc())
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    if dist.is_initialized():
        dist.destroy_process_group()
