"""The benchmark of the weight gradient runs: every step but the kernels, on the CPU."""

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "weight_gradient"


def test_a_dry_run_checks_what_runs_here_and_writes_a_report(tmp_path):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--dry-run", "--seed", "3", "--out", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (report,) = tmp_path.glob("weight-gradient_dry-run_*.md")
    text = report.read_text()
    assert "no number here means anything" in text
    assert "Missing" not in text
    for contender in ("bf16, torch", "high: dequantise x", "FP8: quantise both"):
        assert text.count(f"| weight gradient | {contender}") == 3
