"""The benchmarks run: every step but the timing, at tiny sizes on the CPU."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_a_dry_run_compares_every_contender_and_writes_a_report(tmp_path):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS), "--dry-run", "--out", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (report,) = tmp_path.glob("*.md")
    for contender in ("ours", "torch", "torch, no bincount"):
        assert report.read_text().count(f"| host | {contender} |") == 6, contender
    assert list(tmp_path.glob("*.json"))
