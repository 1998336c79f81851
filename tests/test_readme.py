"""What the README shows runs as it stands."""

import re
import shlex
from pathlib import Path

import pytest
from olmo_trainer.cli import main

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)
COMMANDS = [
    line.split(" # ")[0].strip()
    for block in re.findall(r"```\n(.*?)```", TEXT, flags=re.S)
    for line in block.splitlines()
    if "apps/trainer" in line and line.startswith("uv run ")
]


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: re.findall(r"from (olmo_\w+)", code)[0])
def test_every_package_has_an_example_that_runs(code, capsys):
    exec(compile(code, str(README), "exec"), {})


def test_there_is_one_example_a_package():
    packages = {path.parent.name for path in README.parent.glob("packages/*/pyproject.toml")}
    shown = {re.findall(r"from (olmo_\w+)", code)[0].replace("_", "-") for code in EXAMPLES}
    assert shown == packages
    for name in packages:
        assert f"(packages/{name}/README.md)" in TEXT


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_understood(command, capsys, monkeypatch, tmp_path):
    words = shlex.split(command)
    arguments = words[words.index("apps/trainer") + 1 :]
    if "--nproc-per-node" in words:
        monkeypatch.setenv("WORLD_SIZE", words[words.index("--nproc-per-node") + 1])
    monkeypatch.chdir(tmp_path)
    if arguments[:1] in (["sample"], ["inspect"]) or "--resume" in arguments:
        # There is no run here: the words are understood, and its absence is what is said.
        assert main(arguments) == 2
        assert "no checkpoint here" in capsys.readouterr().err.replace("no run with a ", "no ")
        return
    if arguments[:1] in (["verify"], ["recipes"]):
        with pytest.raises(SystemExit) as stop:
            main([*arguments, "--help"])
        assert stop.value.code == 0
        return
    if "--dry-run" not in arguments:
        arguments.append("--dry-run")
    assert main(arguments) == 0
    assert "parameters" in capsys.readouterr().out


def test_the_readme_begins_with_the_two_commands():
    first, second = re.findall(r"```\n(.*?)```", TEXT, flags=re.S)[:2]
    assert first.strip() == "pip install uv && uv run apps/trainer"
    assert second.strip() == "uv run nox"
    ci = (README.parent / ".ci" / "run").read_text()
    assert ci.strip().endswith("uv run nox")
