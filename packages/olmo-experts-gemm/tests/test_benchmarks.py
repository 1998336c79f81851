"""The benchmarks run: every step but the timing, at tiny sizes on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_a_dry_run_checks_every_contender_and_writes_a_report(tmp_path):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS), "--dry-run", "--only", "product,fine", "--out", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (report,) = tmp_path.glob("*.md")
    assert "grouped" in report.read_text() or "product" in report.read_text()
    assert list(tmp_path.glob("*.json"))


def test_a_dry_run_leaves_the_reports_of_the_package_alone(tmp_path):
    before = sorted((BENCHMARKS / "reports").iterdir())
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS), "--dry-run", "--only", "product"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert sorted((BENCHMARKS / "reports").iterdir()) == before
    (report,) = tmp_path.glob("*/*.md")
    assert f"wrote {report}" in done.stdout
