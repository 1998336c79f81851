"""The benchmarks run: every step but the timing, at tiny sizes on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def _run(*options):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_a_dry_run_checks_every_contender_and_writes_a_report(tmp_path):
    done = _run("--dry-run", "--seed", "3", "--out", tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (report,) = tmp_path.glob("all_dry-run_*.md")
    text = report.read_text()
    assert "no number here means anything" in text
    stored = json.loads(report.with_suffix(".json").read_text())
    cells = {(cell["topic"], cell["what"]): cell for cell in stored["cells"]}
    assert {topic for topic, _ in cells} == {"quantise", "product", "width", "experts", "memory"}
    ours = {
        ("quantise", "both"): "ours",
        ("quantise", "SwiGLU backward"): "ours",
        ("quantise", "weight cache"): "two quantisations",
        ("quantise", "weight cache by 128x128"): "ours",
        ("product", "forward"): "coarse + quantise",
        ("experts", "forward+backward"): "coarse, hidden in MXFP8",
        ("memory", "held for backward"): "coarse, hidden in MXFP8",
    }
    for key, name in ours.items():
        assert cells[key]["samples"][name], key
    peers = ("olmo-core", "torchao")
    failed = [name for cell in stored["cells"] for name in cell["failures"] if name not in peers]
    assert failed == []
    held = cells["memory", "held for backward"]["samples"]
    assert held["coarse, hidden in MXFP8"][0] < 0.55 * held["bf16, olmo-experts-gemm"][0]


SAYS_AGAIN = """
import json, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import report
from cells import Cell
from goals import GOALS

bars = {(g.topic, g.what, g.ours, g.peer): (g.least, g.aim) for g in GOALS}
for (topic, what, ours, peer), both in bars.items():
    if topic == "product":
        for other in ("bf16, torch", "bf16, olmo-experts-gemm"):
            assert bars[topic, what, ours, other] == both, f"{ours} is not judged beside {other}"
reports = list(Path(sys.argv[1]).glob("reports/all_*.json"))
assert reports
for stored in reports:
    data = json.loads(stored.read_text())
    report.write(Path(sys.argv[2]), stored.stem, data["facts"], [Cell(**c) for c in data["cells"]])
    for suffix in (".md", ".json"):
        again = Path(sys.argv[2], stored.stem + suffix).read_text()
        assert again == stored.with_suffix(suffix).read_text(), f"{stored.stem}{suffix} differs"
"""


def test_the_report_says_what_its_numbers_do_beside_both_bf16_products(tmp_path):
    """A goal that changes changes the verdicts, which are made from the stored repeats."""
    command = [sys.executable, "-c", SAYS_AGAIN, str(BENCHMARKS), tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_report_is_never_overwritten_and_bad_options_are_refused(tmp_path):
    for _ in range(2):
        assert _run("--dry-run", "--only", "width", "--out", tmp_path).returncode == 0
    assert len(list(tmp_path.glob("width_dry-run_*.md"))) == 2
    done = _run("--dry-run", "--only", "speed")
    assert done.returncode == 2
    assert "--only takes quantise, product, width, experts, got speed" in done.stderr
