"""The examples of launch/: whole shell and YAML, and arguments that both programs understand."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from olmo_trainer.checkpoint_manifest import newest_step
from olmo_trainer.cli import main
from olmo_trainer.metrics import RunHeader, StepRecord, read_metrics
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "apps" / "trainer" / "launch"
README = (LAUNCH / "README.md").read_text()
SLURM = (LAUNCH / "slurm.sh").read_text()
VALUES = {
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_ID": "7",
    "RUN": "/shared/run",
    "RECIPE": "medium-64e",
    "head_node": "node0",
}


def _kubernetes() -> list[dict]:
    return list(yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text()))


def _slurm_command() -> str:
    command = SLURM[SLURM.index("uv run torchrun") : SLURM.index(" &\n")].replace("\\\n", " ")
    command = command.replace("${SLURM_RESTART_COUNT:-0}", "0")
    return re.sub(r"\$(\w+)", lambda found: VALUES[found[1]], command)


def _kubernetes_command() -> str:
    (container,) = _kubernetes()[1]["spec"]["template"]["spec"]["containers"]
    (command,) = container["args"]
    return re.sub(r"\$\(.*\)", "true", command.removeprefix("exec "))


BLOCKS = re.findall(r"```\n(.*?)\n```", README, flags=re.S)
COMMANDS = {
    "one machine": BLOCKS[0],
    "several machines": BLOCKS[1].splitlines()[-1],
    "slurm": _slurm_command(),
    "kubernetes": _kubernetes_command(),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_torchrun_and_the_trainer_understand_the_command(name, monkeypatch, capsys, tmp_path):
    words = shlex.split(COMMANDS[name])
    assert words[:3] == ["uv", "run", "torchrun"]
    launch = get_args_parser().parse_args(words[3:])
    assert launch.training_script == "apps/trainer"
    assert int(launch.max_restarts) > 0
    if name != "one machine":
        assert launch.rdzv_backend == "c10d"
        assert launch.rdzv_endpoint.endswith(":29400")
        assert launch.rdzv_id != "none"
    world = int(launch.nproc_per_node) * int(launch.nnodes.split(":")[-1])
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.chdir(tmp_path)
    assert "--continue" in launch.training_script_args
    assert main([*launch.training_script_args, "--dry-run"]) == 0
    assert "run.folder = " in capsys.readouterr().out


FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def test_each_start_has_a_store_of_its_own_on_several_machines():
    export = f"export {FRESH_STORE}=1\n"
    assert BLOCKS[1].startswith(export)
    assert export in SLURM
    (container,) = _kubernetes()[1]["spec"]["template"]["spec"]["containers"]
    assert {"name": FRESH_STORE, "value": "1"} in container["env"]
    source = Path(dynamic_rendezvous.__file__).read_text()
    assert f'os.getenv("{FRESH_STORE}", "0") == "1"' in source  # torch still asks for it


def test_the_slurm_script_is_whole():
    subprocess.run(["bash", "-n", str(LAUNCH / "slurm.sh")], check=True, timeout=60)
    assert SLURM.startswith("#!/usr/bin/env bash\n")
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", SLURM, flags=re.M))
    # Slurm reads no #SBATCH after the first command.
    assert SLURM.rindex("#SBATCH") < SLURM.index("set -euo")
    assert options["nodes"] == VALUES["SLURM_JOB_NUM_NODES"]
    assert options["ntasks-per-node"] == "1"  # torchrun starts the rest
    assert options["gpus-per-node"] in COMMANDS["slurm"].split()
    assert options["signal"].startswith("B:USR1@")
    assert "requeue" in options


SHIM = """#!/usr/bin/env bash
case "$(basename "$0")" in
  scontrol) if [ "$1" = show ]; then echo node0; else echo "scontrol $*" >> "$LOG"; fi ;;
  srun)
    echo "srun $*" >> "$LOG"
    for _ in $(seq "$WAIT"); do [ -e "$RUN/stop" ] && break; sleep 0.05; done
    exit "$CODE" ;;
esac
"""


@pytest.mark.parametrize(
    ("code", "asked", "again"),
    [(0, False, False), (0, True, True), (1, False, True), (2, False, False)],
    ids=["over", "time is over", "a crash", "wrong input"],
)
def test_the_slurm_script_goes_on_when_there_is_more_to_do(tmp_path, code, asked, again):
    for name in ("scontrol", "srun"):
        (tmp_path / name).write_text(SHIM)
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        **{"LOG": str(log), "CODE": str(code), "WAIT": "200" if asked else "1"},
        **{"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "node[0-3]"},
        "RUN": str(tmp_path / "run"),
    }
    job = subprocess.Popen(["bash", str(LAUNCH / "slurm.sh")], env=environment)
    if asked:
        deadline = time.monotonic() + 30
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        subprocess.run(["bash", "-c", f"kill -USR1 {job.pid}"], check=True, timeout=60)
    assert job.wait(60) == code
    said = log.read_text().splitlines()
    assert said[0].startswith("srun --kill-on-bad-exit=1 uv run torchrun --nnodes 4")
    assert said[1:] == ["scontrol requeue 7"] * again


def test_the_kubernetes_job_is_whole():
    service, job = _kubernetes()
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = shlex.split(COMMANDS["kubernetes"])
    launch = get_args_parser().parse_args(words[3:])
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(launch.nnodes)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(launch.nproc_per_node)
    # The meeting point is the first pod, by the name that the service gives it.
    name = job["metadata"]["name"]
    assert launch.rdzv_endpoint == f"{name}-0.{pod['subdomain']}:29400"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    stop = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    folder = next(word for word in words if word.startswith("run.folder=")).partition("=")[2]
    assert stop.startswith(f"touch {folder}/stop;")
    subprocess.run(["bash", "-n", "-c", stop], check=True, timeout=60)
    subprocess.run(["bash", "-n", "-c", container["args"][0]], check=True, timeout=60)


def _wait_for(condition, process: subprocess.Popen, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    assert condition(), process.communicate()[0][-3000:] if process.poll() is not None else "late"


@pytest.mark.dist
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
def test_torchrun_starts_a_killed_run_again_and_a_file_stops_it(tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "2"]
    command += [str(ROOT / "apps" / "trainer"), "nano", "--continue", "--steps", "100000"]
    for setting in (
        *(f"run.folder={run}", "run.save_every=2", "run.keep_last=2", "run.heldout_every=0"),
        *("run.heldout_sequences=4", "run.sample_bytes=0", "batch.sequences=4"),
    ):
        command += ["--set", setting]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    try:
        _wait_for(lambda: newest_step(run) >= 2, process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]), 9)
        reached = newest_step(run)
        _wait_for(lambda: len(_headers(run)) == 2, process)
        _wait_for(lambda: newest_step(run) > reached + 2, process)
        (run / "stop").touch()
        output, _ = process.communicate(timeout=120)
    finally:
        process.terminate()  # it ends its own processes, which a kill would leave behind
        process.wait()
    assert process.returncode == 0, output[-3000:]
    assert "as asked" in output
    assert (run / "stop").exists()  # it is not over
    records = read_metrics(run / "metrics.jsonl")
    steps = [each.step for each in records if isinstance(each, StepRecord)]
    assert steps == list(range(1, newest_step(run) + 1))
    assert _headers(run)[1].step >= 2


def _headers(run: Path) -> list[RunHeader]:
    records = read_metrics(run / "metrics.jsonl")
    return [record for record in records if isinstance(record, RunHeader)]
