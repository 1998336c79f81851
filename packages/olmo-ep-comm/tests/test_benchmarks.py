"""The benchmarks run: every step that a CPU can take, at tiny sizes."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_a_dry_run_compares_the_contenders_and_prints_the_buffers(tmp_path):
    command = [sys.executable, str(BENCHMARKS), "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (report,) = tmp_path.glob("exchange_cpu-dry-run_*.md")
    text = report.read_text()
    for contender, cells in (
        *(("rowwise, put", 4), ("rowwise, get", 4), ("all_to_all", 4)),
        *(("eager", 2), ("torch, no barrier", 2), ("moves", 2), ("mxfp8", 1)),
    ):
        assert text.count(f"| {contender} |") == cells, contender
    # T * ranks * K rows of D values of 2 bytes, twice: for one live forward and for gradients.
    assert f"rows 0 {16384 * 2 * 8 * 4096 * 2 / 2**20:.1f}, gradients" in text
