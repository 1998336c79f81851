import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_readme_has_an_example():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_the_examples_run(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
