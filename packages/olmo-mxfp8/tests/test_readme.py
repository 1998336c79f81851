import re
from pathlib import Path

import olmo_mxfp8
import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_examples_run(block):
    exec(compile(block, "README.md", "exec"), {})


def test_there_is_an_example():
    assert BLOCKS


@pytest.mark.parametrize("name", olmo_mxfp8.__all__)
def test_every_public_name_is_in_the_table(name):
    assert hasattr(olmo_mxfp8, name)
    assert re.search(rf"^\| `{name}\b", README, flags=re.MULTILINE)
