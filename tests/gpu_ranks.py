"""Ranks on GPUs, one each where there are enough, and several on one where there are not.

NCCL takes one rank of a host on a device, no second one. Ranks with different `NCCL_HOSTID` are on
different hosts to it, and may share a device: they talk through sockets. What they compute is what
they would compute on devices of their own; how long they take says nothing.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from free_port import free_port


def gpu_of(rank: int) -> torch.device:
    """Return the rank's device."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def environment_of(rank: int) -> dict[str, str]:
    """Return what the process of a rank needs in its environment; nothing without a GPU."""
    count = torch.cuda.device_count()
    if not count:
        return {}
    return {
        "NCCL_HOSTID": f"{socket.gethostname()}-{rank // count}",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        # Multicast stays off: a program that uses it can put a shared host's GPUs out of service.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }


def launch(program: Path, *arguments: str, world: int, timeout: float = 240.0) -> str:
    """Start `world` ranks of a program with torchrun; return what they print.

    Raises:
        AssertionError: A rank failed, with what it said, or `timeout` seconds were over.
    """
    each = min(world, torch.cuda.device_count())
    assert world % each == 0, f"{world} ranks must share {each} GPUs alike"
    port = free_port()
    hosts = world // each
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts}"]
    command += [f"--nproc-per-node={each}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"{host}.txt" for host in range(hosts)]
        agents = []
        for host, output in enumerate(outputs):
            with output.open("w") as file:
                agents.append(
                    subprocess.Popen(
                        [*command, f"--node-rank={host}", str(program), *arguments],
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **environment_of(host * each)},
                    )
                )
        failed = _wait(agents, timeout)
        said = "\n".join(output.read_text() for output in outputs)
    assert not failed, f"{failed}:\n{said[-6000:]}"
    return said


def _wait(agents: list[subprocess.Popen[bytes]], timeout: float) -> str:
    """Wait for all, or for one that fails; end them; return what went wrong."""
    deadline = time.monotonic() + timeout
    try:
        while any(agent.poll() is None for agent in agents):
            if any(agent.poll() for agent in agents):
                break
            if time.monotonic() > deadline:
                return f"not done within {timeout} s"
            time.sleep(0.1)
        codes = [agent.poll() for agent in agents]
        return f"exit statuses {codes} (None: still running)" if any(codes) else ""
    finally:
        for agent in agents:
            agent.terminate()  # an agent of torchrun ends its ranks
        for agent in agents:
            agent.wait()
