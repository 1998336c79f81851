"""The README's examples run, and its table names what the package exports."""

import re
from pathlib import Path

import olmo_routing
import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_example_runs(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "__readme__"})


def test_the_table_lists_every_public_name():
    assert BLOCKS
    listed = re.findall(r"^\| `(\w+)", README, flags=re.MULTILINE)
    assert sorted(listed) == sorted(olmo_routing.__all__)
