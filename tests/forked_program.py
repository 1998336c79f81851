"""Run the trainer's command line many times, cheaply: forks of a process that has imported torch.

    with ForkedProgram(folder) as program:
        pid = program.start(["nano", "--steps", "3"])     # as `uv run apps/trainer nano --steps 3`
        os.kill(pid, signal.SIGKILL)
        assert program.wait(pid) == -signal.SIGKILL

Importing torch takes seconds; a fork of a process with one thread takes milliseconds.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from free_port import free_port


class ForkedProgram:
    """Starts runs of the program; their output goes to files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0
        self._outputs: dict[int, Path] = {}
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._ask({})  # has imported torch

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        before: str = "",
    ) -> int:
        """Start a run; return its process id. `before` is Python that it executes first."""
        self._count += 1
        output = self.folder / f"output-{self._count}"
        pid = self._ask(
            {
                "arguments": [*arguments],
                "environment": {**(environment or {})},
                "output": str(output),
                "before": before,
            }
        )
        self._outputs[pid] = output
        return pid

    def start_ranks(self, arguments: Sequence[str], world: int, *, before: str = "") -> list[int]:
        """Start the ranks of one run, as torchrun does; return their process ids."""
        port = free_port()
        common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
        return [
            self.start(
                arguments,
                {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                before=before,
            )
            for rank in range(world)
        ]

    def wait(self, pid: int) -> int:
        """Wait for a run; return its exit code, negative for the signal that ended it."""
        return self._ask({"wait": pid})

    def ended(self, pid: int) -> bool:
        """Whether a run is over, without waiting."""
        return bool(self._ask({"poll": pid}))

    def output(self, pid: int) -> str:
        """Return what a run has written to its standard output and error."""
        return self._outputs[pid].read_text()

    def _ask(self, request: dict[str, Any]) -> int:
        stdin, stdout = self._server.stdin, self._server.stdout
        assert stdin is not None, "a pipe"
        assert stdout is not None, "a pipe"
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        return int(stdout.readline())

    def __enter__(self) -> "ForkedProgram":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()
        self._server.wait()
        for pipe in (self._server.stdin, self._server.stdout):
            if pipe is not None:
                pipe.close()


def _serve() -> None:
    import olmo_trainer.end_of_run
    import olmo_trainer.loop  # noqa: F401
    import torch._dynamo  # noqa: F401, the first custom op imports it
    from olmo_trainer.cli import main

    codes: dict[int, int] = {}

    def answer(request: dict[str, Any]) -> int:
        if "poll" in request and request["poll"] not in codes:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            if pid:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if "poll" in request:
            return int(request["poll"] in codes)
        if "wait" in request:
            if request["wait"] not in codes:
                _, status = os.waitpid(request["wait"], 0)
                codes[request["wait"]] = os.waitstatus_to_exitcode(status)
            return codes[request["wait"]]
        if "arguments" not in request:
            return 0
        pid = os.fork()
        if pid:
            return pid
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(request["environment"])
        try:
            exec(request["before"], {"rank": int(os.environ.get("RANK", "0"))})
            code = main(request["arguments"])
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 70
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    for line in sys.stdin:
        print(answer(json.loads(line)), flush=True)  # noqa: T201


if __name__ == "__main__":
    _serve()
