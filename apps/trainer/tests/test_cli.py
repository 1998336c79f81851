import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from olmo_trainer.checkpoint_manifest import MANIFEST
from olmo_trainer.cli import COMMANDS, main

APP = Path(__file__).parents[1]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(APP), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "--help"], ["verify", "-h"], ["import", "-h"], ["export", "-h"]],
)
def test_help_answers_without_torch(arguments):
    code = (
        "import sys; from olmo_trainer.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert 'torch' not in sys.modules; assert 'pydantic' not in sys.modules"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert time.monotonic() - began < 3  # about 0.2 s alone; CI shares its cores
    assert "usage: apps/trainer" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["toyy"], "no recipe or command 'toyy'; recipes: toy, toy-mxfp8, nano, olmoe-1b-7b,"),
        (["--set", "modle.d_model=8"], "modle.d_model: no such key"),
        (["--steps", "0"], "steps = 0: input should be greater than or equal to 1"),
        (["--set", "layout.pipeline=2"], "layout.pipeline (2) must divide the number of processes"),
        (["--resume", "/nowhere"], "/nowhere: no checkpoint here"),
        (["inspect", "/nowhere"], "/nowhere: no checkpoint here"),
        (["sample", "/nowhere", "--bytes", "0"], "--bytes must be in [1, 2.14748e+09], got 0"),
        (["sample", "/nowhere", "--temperature", "nan"], "--temperature must be in [0, 1e+06]"),
    ],
)
def test_wrong_input_exits_2_with_one_clear_message(
    arguments, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_wrong_input_is_said_before_any_process_group():
    # MASTER_ADDR leads nowhere: whoever tried to join a process group would hang or say so.
    world = {"WORLD_SIZE": "3", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    done = run("--set", "layout.pipeline=2", RANK="0", **world)
    assert done.returncode == 2
    assert "layout.pipeline (2) must divide the number of processes (3)" in done.stderr


def test_another_rank_lets_the_main_one_speak_first(monkeypatch, capsys):
    # A launcher ends all ranks with the first that fails: one that failed at once would silence
    # the main rank. One that is not ended is alone with its error.
    said_before_waiting = []
    monkeypatch.setattr(
        time, "sleep", lambda _: said_before_waiting.append(capsys.readouterr().err)
    )
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank, opening in (("0", "error: layout.pipe"), ("1", "error on rank 1: layout.pipe")):
        monkeypatch.setenv("RANK", rank)
        assert main(["--set", "layout.pipeline=2"]) == 2
        assert capsys.readouterr().err.startswith(opening)
    assert said_before_waiting == [""]


def test_a_missing_data_folder_is_named(tmp_path):
    done = run(
        "nano",
        "--set",
        "data.source.kind=text_folder",
        "--set",
        f"data.source.path={tmp_path}/none",
    )
    assert done.returncode == 2
    assert f"{tmp_path}/none" in done.stderr
    assert "Traceback" not in done.stderr


def test_dry_run_prints_config_counts_and_bytes(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["toy", "--dry-run", "--set", "batch.sequences=32"]) == 0
    out = capsys.readouterr().out
    assert "batch.sequences = 32" in out
    assert "total" in out
    assert "active a token" in out
    assert "bytes" in out
    assert not list(tmp_path.iterdir())


def test_the_readme_names_every_command_and_option(capsys):
    text = (APP / "README.md").read_text(encoding="utf-8")
    lines = text.split("```")[1].replace("\n   ", " ").splitlines()
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
        (line,) = [line for line in lines if re.search(rf"trainer \[?{command}\b", line)]
        assert set(re.findall(r"--[a-z-]+", line)) == options, command


def test_recipes_lists_every_recipe(capsys):
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("toy", "toy-mxfp8", "nano"))


def test_the_whole_story_of_a_run(tmp_path, capsys):
    """Train, inspect, sample, resume a finished run, and break the checkpoint."""
    folder = tmp_path / "run"
    trained = run("nano", "--steps", "3", "--set", f"run.folder={folder}")
    assert trained.returncode == 0, trained.stderr
    assert "step 3/3" in trained.stdout
    assert "bits a byte" in trained.stdout
    assert "\x1b" not in trained.stdout
    checkpoint = folder / "checkpoints" / "step-00000003"
    assert str(checkpoint) in trained.stdout.replace("\n", "")
    report = (folder / "report.html").read_text()
    assert report.count("<svg") >= 3
    assert main(["inspect", str(folder)]) == 0
    assert "step 3 of 3" in capsys.readouterr().out
    prompt = ["--bytes", "5", "--temperature", "0", "--prompt", "a[:x:] = d[/b] :key:"]
    assert main(["sample", str(folder), *prompt]) == 0
    assert capsys.readouterr().out.startswith("a[:x:] = d[/b] :key:")
    assert main(["--resume", str(folder)]) == 0
    assert "already at step 3 of 3; nothing to do" in capsys.readouterr().out.replace("\n", "")
    for name, message in _breakages(checkpoint):
        assert main(["--resume", str(folder), "--steps", "5"]) == 2, name
        error = capsys.readouterr().err
        assert message in error, name
        assert len(error.splitlines()) == 1, name


def test_a_run_outlives_who_reads_its_output(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, str(APP), "nano", "--steps", "4", "--set", "run.log_every=1"]
    with subprocess.Popen(
        [*command, "--set", f"run.folder={folder}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.readline()
        program.stdout.close()
        assert program.wait(timeout=120) == 0, program.stderr.read()
        assert program.stderr.read() == ""
    assert (folder / "checkpoints" / "step-00000004").exists()


def test_a_dry_run_pretends_processes(capsys):
    assert main(["medium-128e", "--dry-run", "--processes", "32"]) == 0
    assert "data 8 x expert 8 x pipeline 4" in capsys.readouterr().out
    assert main(["nano", "--processes", "2"]) == 2
    assert "--processes is for --dry-run" in capsys.readouterr().err
    assert main(["nano", "--dry-run", "--processes", "0"]) == 2
    assert "--processes must be at least 1, got 0" in capsys.readouterr().err


def _breakages(checkpoint: Path):
    manifest = checkpoint / MANIFEST
    whole = json.loads(manifest.read_text())
    manifest.write_text("{")
    yield "description cut", "cannot be read"
    manifest.write_text(json.dumps(whole))
    data = next(each for each in checkpoint.iterdir() if each.suffix == ".safetensors")
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    yield "data cut", "truncated"
    data.unlink()
    yield "data missing", "is missing"
    data.write_bytes(content)


def test_a_checkpoint_of_another_model_is_named(tmp_path, capsys):
    folder = tmp_path / "run"
    settings = ("--set", f"run.folder={folder}", "--set", "run.sample_bytes=0")
    assert main(["nano", "--steps", "1", *settings]) == 0
    for setting, message in (
        (
            "model.d_model=64",
            "a checkpoint of another model: model.d_model is 32 there and 64 here",
        ),
        ("model.moe.num_experts=8", "model.moe.num_experts is 4 there and 8 here"),
        ("model.moe.bias_rate=0", "model.moe.bias_rate is 0.001 there and 0.0 here"),
        ("seed=3", "trained on other data"),
        ("data.sequence_length=32", "trained on other data"),
    ):
        capsys.readouterr()
        again = ["nano", "--resume", str(folder), "--steps", "2", *settings, "--set", setting]
        assert main(again) == 2
        assert message in capsys.readouterr().err
