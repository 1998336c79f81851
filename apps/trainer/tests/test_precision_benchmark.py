"""The program that asks whether MXFP8 trains: its numbers are those of the runs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from olmo_trainer.metrics import METRICS, StepRecord, read_metrics

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "precision"
NAMES = {
    "bf16": "BF16",
    "rceil": "exact MXFP8, rceil scales",
    "floor": "exact MXFP8, floor scales",
    "coarse": "coarse MXFP8 (a scale for 128), rceil",
}


def _call(*options, **environment):
    return subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, options)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


def _rows(report: Path) -> dict[str, list[str]]:
    lines = [line.split(" | ") for line in report.read_text().splitlines()]
    return {line[0].strip("| "): [cell.strip("| ") for cell in line[1:]] for line in lines}


def test_the_numbers_of_a_report_are_those_of_its_runs(tmp_path):
    # As on a machine without matplotlib, where also the trainer's own last page fails.
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "matplotlib.py").write_text("raise ImportError('not here')\n")
    paths = os.pathsep.join([str(hidden), os.environ.get("PYTHONPATH", "")])
    done = _call(
        *("--dry-run", "--recipes", "mid", "--seeds", "1", "--steps", "11"),
        *("--out", tmp_path / "out", "--runs", tmp_path / "runs"),
        PYTHONPATH=paths,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (report,) = (tmp_path / "out").glob("precision_dry-run_*.md")
    assert "no number here means anything" in report.read_text()
    assert f"`--render {report.with_suffix('.json').name}` draws it" in report.read_text()
    assert not list((tmp_path / "out").glob("*.svg"))
    measured = {}
    for precision in NAMES:
        records = read_metrics(tmp_path / "runs" / f"mid_{precision}_seed-1" / METRICS)
        steps = [each for each in records if isinstance(each, StepRecord)]
        assert len(steps) == 11
        measured[precision] = steps[-1]
    assert len({each.loss for each in measured.values()}) == len(NAMES)
    rows, plain = _rows(report), measured["bf16"]
    assert plain.heldout_loss is not None
    for precision, step in measured.items():
        assert step.heldout_loss is not None
        above = ("", "", "")
        if precision != "bf16":
            above = (
                f"{step.loss - plain.loss:+.4f}",
                f"{step.heldout_loss - plain.heldout_loss:+.4f}",
                f"{step.grad_norm / plain.grad_norm - 1:+.1%}",
            )
        assert rows[NAMES[precision]] == [
            *("1", f"{step.loss:.4f}", above[0], f"{step.heldout_loss:.4f}", above[1]),
            *(f"{step.grad_norm:.3f}", above[2], "none"),
        ]
    # The JSON that came back is drawn elsewhere.
    assert _call("--render", report.with_suffix(".json")).returncode == 0
    assert report.with_suffix(".svg").read_text().count("training loss") == 1
    assert f"![Curves]({report.stem}.svg)" in report.read_text()


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs Linux's /proc")
def test_who_stops_the_program_stops_its_runs(tmp_path):
    runs = tmp_path / "runs"
    options = ("--dry-run", "--recipes", "toy", "--precisions", "bf16", "--steps", "1000000")
    command = [sys.executable, str(PROGRAM), *options, "--out", str(tmp_path), "--runs", str(runs)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as program:
        deadline = time.monotonic() + 300
        while len(list(runs.glob(f"*/{METRICS}"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert len(_processes_of(runs)) == 2
        program.terminate()
        assert program.wait(60) == 128 + signal.SIGTERM
    assert _processes_of(runs) == []


def _processes_of(runs: Path) -> list[str]:
    """Return the command lines of the trainers that write below `runs`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().replace("\0", " ")
        except OSError:  # it has ended
            continue
        if f"run.folder={runs}" in words:
            found.append(words)
    return found


def _stored(path: Path, seed: int, *, shared: str = "steps=20", norm: float = 1.0) -> Path:
    """Write the runs of one seed: floor 0.02 + 0.01 seed above BF16 at the end, not before."""

    def run(precision: str, end: float, norm: float, failure: str = "") -> dict[str, object]:
        return {
            "case": {"recipe": "toy", "precision": precision, "seed": seed},
            "losses": [5.0] * 18 + [end - 0.1, end + 0.1],
            "norms": [9.0] * 18 + [norm, norm],
            "heldout": None if failure else end,
            "versions": {},
            "failure": failure,
        }

    runs = [run("bf16", 2.0, 1.0), run("floor", 2.02 + 0.01 * seed, norm)]
    runs.append(run("coarse", 2.0, 1.0, "exit status 1: out of\nluck" if seed else ""))
    facts = {"date": "2026-12-01 00:00 UTC", "dry run": "no", "command": str(path)}
    content = {"facts": [facts], "shared": {"toy": [shared]}, "runs": runs}
    path.write_text(json.dumps(content))
    return path


def test_files_are_joined_into_one_report_with_the_spread_over_seeds(tmp_path):
    first = _stored(tmp_path / "a.json", 0, norm=1.1)
    second = _stored(tmp_path / "b.json", 1, norm=1.3)
    done = _call("--render", first, second)
    assert done.returncode == 0, done.stderr
    report = tmp_path / "a_joined.md"
    rows = _rows(report)
    assert rows[NAMES["floor"]] == [
        *("2", "2.0250 ± 0.0071 [2.0200..2.0300]", "+0.0250 ± 0.0071 [+0.0200..+0.0300]"),
        *("2.0250 ± 0.0071 [2.0200..2.0300]", "+0.0250 ± 0.0071 [+0.0200..+0.0300]"),
        *("1.200 ± 0.141 [1.100..1.300]", "+20.0% ± 14.1% [+10.0%..+30.0%]", "none"),
    ]
    assert rows[NAMES["coarse"]] == [
        *("1", "2.0000", "+0.0000", "2.0000", "+0.0000", "1.000", "+0.0%", "1")
    ]
    assert "- toy_coarse_seed-1: exit status 1: out of" in report.read_text()
    assert report.with_suffix(".svg").exists()
    elsewhere = tmp_path / "elsewhere"
    assert _call("--render", first, second, "--out", elsewhere).returncode == 0
    assert (elsewhere / report.name).read_text() == report.read_text()
    refused = _call("--render", first, "--seeds", "1")
    assert refused.returncode == 2
    assert "takes --out alone, got --seeds" in refused.stderr


@pytest.mark.parametrize(
    ("seed", "shared", "message"),
    [
        (1, "steps=40", "must share their settings"),
        (0, "steps=20", "each run must be in one file"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, seed, shared, message):
    first = _stored(tmp_path / "a.json", 0)
    second = _stored(tmp_path / "b.json", seed, shared=shared)
    done = _call("--render", first, second)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--recipes", "tiny"), "must be some of toy, mid, got 'tiny'"),
        (("--seeds", "one"), "must be numbers"),
        (("--seeds=-1",), "seed = -1"),
        (("--workers", "0"), "--workers must be at least 1"),
        (("--steps", "0"), "steps = 0"),
    ],
)
def test_wrong_options_are_refused_before_any_run(tmp_path, options, message):
    done = _call("--dry-run", "--out", tmp_path, *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert not list(tmp_path.iterdir())
