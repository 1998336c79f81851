import re
import tomllib
from pathlib import Path
from typing import get_args

from olmo_trainer.extras import Extra, install_command

APP = Path(__file__).parents[1]


def test_the_command_names_what_the_app_declares():
    project = tomllib.loads((APP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(get_args(Extra)) == set(project["optional-dependencies"])
    for extra in get_args(Extra):
        # Without --package uv looks for the extra in the root's project, which has none.
        assert f"--package {project['name']} --extra {extra}`" in install_command(extra)


def test_the_readme_gives_the_same_command():
    text = (APP / "README.md").read_text(encoding="utf-8")
    given = set(re.findall(r"uv sync [^`\n]*", text))
    assert len(given) == 2
    assert given <= {install_command(extra).strip("`") for extra in get_args(Extra)}
