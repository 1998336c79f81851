"""The gerrymandering experiment runs: every step of it, at a tiny size on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

EXPERIMENT = Path(__file__).parent.parent / "benchmarks" / "gerrymandering"


def test_a_dry_run_writes_a_report_a_plot_and_every_point(tmp_path):
    arms = "ordinary:3,margin:3,ordinary:0"
    done = subprocess.run(
        [sys.executable, str(EXPERIMENT), "--dry-run", "--arms", arms, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (report,) = tmp_path.glob("*.md")
    assert "| margin 3 | 1 |" in report.read_text()
    assert "A dry run" in report.read_text()
    (picture,) = tmp_path.glob("*.svg")
    assert picture.read_text().count("<polyline") == 3 * 6
    (data,) = tmp_path.glob("*.json")
    runs = json.loads(data.read_text())["runs"]
    assert [run["arm"]["coefficient"] for run in runs] == [3, 3, 0]
    # The same weights and the same held-out bytes: only the arms' own losses differ at first.
    first = [run["points"][0] for run in runs]
    assert len({point["language_loss"] for point in first}) == 1
    assert first[0]["trained_loss"] != first[1]["trained_loss"]
    assert runs[0]["points"][-1]["language_loss"] < first[0]["language_loss"]
