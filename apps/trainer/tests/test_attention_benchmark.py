import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "attention"


def _call(*arguments):
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_dry_run_writes_a_row_for_each_view_and_way(tmp_path):
    done = _call("--dry-run", "--rounds", "2", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    (report,) = tmp_path.glob("attention_dry-run_*.md")
    rows = [line for line in report.read_text().splitlines() if " forward | " in line]
    assert len(rows) == 3
    cells = json.loads(report.with_suffix(".json").read_text())["cells"]
    assert all(
        len(repeats) == 2
        for cell in cells
        for by_name in cell["times"].values()
        for repeats in by_name.values()
    )


@pytest.mark.parametrize(("arguments", "why"), [(("--rounds", "0"), "at least 1, got 0")])
def test_what_cannot_be_measured_is_refused(arguments, why):
    refused = _call(*arguments)
    assert refused.returncode == 2
    assert why in refused.stderr
