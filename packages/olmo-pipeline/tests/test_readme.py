import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_examples_print_what_they_say(capsys):
    assert len(BLOCKS) == 4
    printed = []
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), {})
        printed.append(capsys.readouterr().out)
    said = re.findall(r"^# (.*)$|^print.*  # (.*)$", BLOCKS[0], re.MULTILINE)
    said = [(comment or trailing).removesuffix(" activations") for comment, trailing in said]
    said = [line for line in said if not line.endswith(":")]
    assert [line for line in printed[0].splitlines() if line] == said
    assert float(printed[1].split()[1]) > 0
    assert printed[2:] == ["", ""], "the split examples need no word of warning"


@pytest.mark.dist
def test_the_executor_in_two_processes_without_numpy_is_the_one_of_one(tmp_path, capsys):
    """Torch alone does not bring numpy, and some of its collectives need it."""
    exec(compile(BLOCKS[1], "README.md", "exec"), {})
    of_one = capsys.readouterr().out.split()
    (tmp_path / "example.py").write_text(BLOCKS[1])
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('no numpy')")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(tmp_path / "example.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    of_two = done.stdout.split()
    assert of_two[::2] == of_one[::2] == ["loss", "gradient"]
    for two, one in zip(of_two[1::2], of_one[1::2], strict=True):
        assert float(two) == pytest.approx(float(one), rel=1e-5)
