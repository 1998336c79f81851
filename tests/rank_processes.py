"""A pytest plugin: run a test's function in several processes joined by gloo.

Importing torch takes seconds, so the workers start once a session and every call gives them a fresh
process group. A test asks for the fixture and passes a function of its own module:

    def _sum(rank: int, world: int, value: float) -> float:
        ...                                     # torch.distributed is initialised here

    @pytest.mark.dist
    def test_sum(processes):
        assert processes.run(_sum, 2.0, world=4) == [8.0] * 4

Arguments and results are pickled. A rank that raises fails the test with its traceback; a rank that
hangs fails it after `timeout` seconds and the workers are replaced.
"""

import contextlib
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pytest

MAX_WORLD = 4
START_SECONDS = 120.0


class RankProcesses:
    """Up to `MAX_WORLD` worker processes, started at the first call."""

    def __init__(self) -> None:
        self._workers: list[tuple[subprocess.Popen[bytes], Connection]] = []

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        world: int,
        timeout: float = 120.0,
    ) -> list[Any]:
        """Return `function(rank, world, *arguments)` of every rank, in rank order."""
        if not 1 <= world <= MAX_WORLD:
            raise ValueError(f"`world` must be in [1, {MAX_WORLD}], got {world}.")
        self._start()
        path = sys.modules[function.__module__].__file__
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, connection) in enumerate(self._workers[:world]):
                call = (path, function.__qualname__, arguments, rank, world, f"{folder}/store")
                connection.send_bytes(pickle.dumps(call))
            return self._collect(world, timeout)

    def _collect(self, world: int, timeout: float) -> list[Any]:
        results, errors = [], []
        deadline = time.monotonic() + timeout
        for rank, (_, connection) in enumerate(self._workers[:world]):
            # Once a rank has failed the others wait for it in a collective: do not wait for them.
            if not connection.poll(2.0 if errors else max(0.0, deadline - time.monotonic())):
                errors.append(f"rank {rank} did not answer within {timeout} s")
                continue
            succeeded, value = pickle.loads(connection.recv_bytes())
            (results if succeeded else errors).append(
                value if succeeded else f"rank {rank}: {value}"
            )
        if errors:
            self.close()
            pytest.fail("\n".join(errors), pytrace=False)
        return results

    def _start(self) -> None:
        if self._workers:
            return
        from gpu_ranks import environment_of  # imports torch, which not every test run needs

        with Listener(family="AF_UNIX") as listener:
            command = [sys.executable, __file__, str(listener.address)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            started = [
                subprocess.Popen(command, env={**environment, **environment_of(rank)})
                for rank in range(MAX_WORLD)
            ]
            self._workers = [(worker, listener.accept()) for worker in started]

    def close(self) -> None:
        """End the workers."""
        for worker, connection in self._workers:
            connection.close()
            worker.kill()
            worker.wait()
        self._workers = []


@pytest.fixture(scope="session")
def processes() -> Iterator[RankProcesses]:
    """Worker processes for tests that need several ranks."""
    workers = RankProcesses()
    yield workers
    workers.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where pytest-xdist shares tests out, one of its processes runs all that need ranks."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if "processes" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group("ranks"))


def _load(path: str) -> Any:
    name = "_ranks_" + path.replace("/", "_").replace(".", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None, f"no module at {path}"
        assert spec.loader is not None, f"no loader for {path}"
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def _serve(connection: Connection) -> None:
    """Answer calls until the test session goes away."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        call = connection.recv_bytes()
        try:
            path, name, arguments, rank, world, store = pickle.loads(call)
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world
            )
            answer = (True, getattr(_load(path), name)(rank, world, *arguments))
            dist.barrier()
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        _serve(Client(sys.argv[1], family="AF_UNIX"))
