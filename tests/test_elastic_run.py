"""A run whose number of machines changes: torchrun's agents come and go, training goes on."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from free_port import free_port
from olmo_trainer.checkpoint_manifest import newest_step
from olmo_trainer.cli import main
from olmo_trainer.metrics import RunHeader, StepRecord, read_metrics

ROOT = Path(__file__).parents[1]
CHILDREN = "/proc/{0}/task/{0}/children"
SETTINGS = (
    *("run.save_every=2", "run.keep_last=3", "run.heldout_every=0", "run.heldout_sequences=4"),
    *("run.sample_bytes=0", "run.threads=1", "run.log_every=100", "batch.sequences=4"),
    *("data.sequence_length=32", "data.source.kind=text_folder"),
    # One rate however long the run is, and steps that do not turn rounding into direction.
    *("schedule.final_fraction=1", "optimizer.epsilon=1e-3"),
)


class Machines:
    """One torchrun each, of one process; the first is where they meet."""

    def __init__(self, folder: Path, program: list[str]) -> None:
        self._port = free_port()
        self._folder, self._program = folder, program
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        output = self.output(len(self.agents))
        quick = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
            *("--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"localhost:{self._port}", "--rdzv-id", "mine"),
            *("--rdzv-conf", f"is_host={int(not self.agents)},{quick}"),
            *("--local-addr", "localhost", "--monitor-interval", "0.1", *self._program),
        ]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with output.open("wb") as file:
            self.agents.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))

    def lose(self, index: int) -> None:
        """The power of a machine is gone: its agent and its process end at once."""
        agent = self.agents[index]
        workers = Path(CHILDREN.format(agent.pid)).read_text().split()
        for pid in (agent.pid, *map(int, workers)):
            os.kill(pid, signal.SIGKILL)
        agent.wait()

    def output(self, index: int) -> Path:
        return self._folder / f"machine-{index}"

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            assert self.agents[0].poll() is None, self.output(0).read_text()[-3000:]
            time.sleep(0.02)
        assert condition(), self.output(0).read_text()[-3000:]

    def close(self) -> None:
        for agent in self.agents:
            agent.terminate()  # ends its process too, which a kill would leave behind
        for agent in self.agents:
            agent.wait()


def _records(run: Path, kind: type) -> list:
    path = run / "metrics.jsonl"
    return [each for each in read_metrics(path) if isinstance(each, kind)] if path.exists() else []


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder, words = tmp_path / "texts", random.Random(0)
    folder.mkdir()
    for index in range(12):
        (folder / f"{index}.txt").write_text(" ".join(words.choices(["ab", "cde", "f"], k=400)))
    return folder


@pytest.fixture
def machines(tmp_path: Path, texts: Path) -> Iterator[Machines]:
    settings = (*SETTINGS, f"data.source.path={texts}", f"run.folder={tmp_path / 'run'}")
    program = [str(ROOT / "apps" / "trainer"), "nano", "--continue", "--steps", "100000"]
    machines = Machines(tmp_path, [*program, *(part for x in settings for part in ("--set", x))])
    yield machines
    machines.close()


@pytest.mark.dist
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
def test_a_machine_is_lost_and_another_comes(machines, texts, tmp_path):
    run = tmp_path / "run"

    def worlds() -> list[int]:
        return [each.info["world"] for each in _records(run, RunHeader)]

    machines.start()
    machines.start()
    machines.wait_for(lambda: newest_step(run) >= 4)
    assert worlds() == [2]
    machines.lose(1)
    machines.wait_for(lambda: len(worlds()) == 2)
    alone = _records(run, RunHeader)[1].step
    assert alone >= 4
    machines.wait_for(lambda: newest_step(run) > alone + 4)
    machines.start()
    machines.wait_for(lambda: len(worlds()) == 3)
    together = _records(run, RunHeader)[2].step
    machines.wait_for(lambda: newest_step(run) > together + 4)
    machines.lose(0)  # without the meeting point nobody goes on, and what was saved stands
    assert machines.agents[2].wait(60) == 1, machines.output(2).read_text()[-3000:]
    assert worlds() == [2, 1, 2]
    steps = _records(run, StepRecord)
    assert [each.step for each in steps] == list(range(1, len(steps) + 1))
    assert newest_step(run) > together + 4
    assert len({each.tokens for each in steps}) == 1  # one global batch throughout
    # The same run as one process makes: its order of the data, its weights across the change.
    straight, last = tmp_path / "straight", alone + 5
    settings = (*SETTINGS, f"data.source.path={texts}", f"run.folder={straight}", f"steps={last}")
    assert main(["nano", *(part for each in settings for part in ("--set", each))]) == 0
    expected = [each.loss for each in _records(straight, StepRecord)]
    assert [each.loss for each in steps[:last]] == pytest.approx(expected, rel=1e-3)
