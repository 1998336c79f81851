import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PATH.read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_has_examples():
    assert sum("torchrun" in block for block in BLOCKS) == 1
    assert len(BLOCKS) > 1


@pytest.mark.parametrize("block", [block for block in BLOCKS if "torchrun" not in block])
def test_the_examples_run(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.dist
def test_the_example_of_several_ranks_runs_without_numpy(tmp_path):
    """Torch alone does not bring numpy, and some of its collectives need it."""
    (block,) = [block for block in BLOCKS if "torchrun" in block]
    (tmp_path / "layer.py").write_text(block)
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('there is no numpy')")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(tmp_path / "layer.py")],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    # How the processes end is torch's: its threads may abort them after their last line.
    assert done.stdout.count("equals all_to_all") == 2, done.stdout + done.stderr[-3000:]
