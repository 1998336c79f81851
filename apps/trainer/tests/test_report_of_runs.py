"""The report of a run's folder, and one page of several runs."""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from olmo_trainer.cli import main
from olmo_trainer.metrics import (
    HeldoutRecord,
    MetricsLog,
    RanksRecord,
    RunHeader,
    StepRecord,
)
from olmo_trainer.recipes import nano
from olmo_trainer.report import history as history_of
from olmo_trainer.report import pictures
from olmo_trainer.report.compare import write_comparison
from olmo_trainer.report.of_run import report_run


def _run(folder: Path, *, loss: float = 2.0, bytes_per_token=1.0, steps: int = 30, **model) -> Path:
    """Write a log as a run does."""
    config = nano().model_dump(mode="json")
    config["optimizer"]["learning_rate"] = loss / 1000
    layers = len(nano().model.moe_layers)
    with MetricsLog(folder / "metrics.jsonl") as log:
        info = {"config": config, "bytes_per_token": bytes_per_token, "versions": {"torch": "9"}}
        log.write(RunHeader(step=0, info=info))
        for step in range(1, steps + 1):
            log.write(
                StepRecord(
                    step=step,
                    loss=loss + 1 / step,
                    balance_loss=1.0,
                    auxiliary_loss=0.0,
                    z_loss=0.0,
                    grad_norm=1.0,
                    learning_rate=loss / 1000,
                    tokens=1000,
                    seconds=0.5,
                    tokens_per_second=2000.0,
                    worst_imbalance=1.5,
                    expert_counts=[[1, 2, 3, 4]] * layers,
                    imbalance=[1.6] * layers,
                    honesty=[1.0] * layers,
                    entropy_deficit=[0.1] * layers,
                    dead_experts=[0] * layers,
                    balance={"topk_margin": [0.125] * layers, "dead_mass": [0.0] * layers},
                    phase_seconds={"data": 0.1, "forward": 0.15, "backward": 0.25},
                    flops_per_second=2e12,
                    model_flops_utilization=0.25,
                )
            )
            if step % 10 == 0:
                log.write(
                    HeldoutRecord(
                        step=step,
                        loss=loss + 0.25,
                        tokens=100,
                        seconds=1.0,
                        source_losses={"web": loss, "<code>": loss + 0.5},
                        source_tokens={"web": 50, "<code>": 50},
                    )
                )
        kinds = {"weights": [1_000_000, 1_000_000], "peak": [3_000_000, 2_000_000]}
        log.write(RanksRecord(step=steps, own_seconds=[0.4, 0.9], memory_bytes=kinds))
    return folder


def _words(path: Path) -> str:
    page = path.read_text("utf-8")
    # Nothing is fetched: XML's names of namespaces are no links.
    assert set(re.findall(r"\w+://[^\"' <]+", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "<script" not in page
    return " ".join(" ".join(ElementTree.fromstring(page).itertext()).split())


def test_a_run_that_goes_on_has_a_report_with_everything_its_log_holds(tmp_path, capsys):
    run = _run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"kind": "step", "step"')  # it is writing just now
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    words = _words(run / "report.html")
    for wanted in (
        "cross-entropy (nats per byte)",
        "bits per byte",
        "Held-out loss of each source.",
        "<code>",
        "2.5000",
        "seconds a step, main rank",
        "useful FLOP/s, all devices",
        "25.0% of the dense BF16 peak",
        "topk margin",
        "0.125",
        "rank 1 0.900 s 1.00M 2.00M rank 0 0.400 s 1.00M 3.00M",
        "versions.torch",
        "layer 1",
    ):
        assert wanted in words, wanted


def test_other_tokens_are_no_bytes(tmp_path):
    words = _words(report_run(_run(tmp_path / "run", bytes_per_token=None)))
    assert "cross-entropy (nats per token)" in words
    assert "held-out (nats per token)" in words
    assert "nats per byte" not in words
    assert "bits per byte" not in words.lower()


def test_a_known_length_of_tokens_gives_bits_per_byte(tmp_path):
    words = _words(report_run(_run(tmp_path / "run", loss=2.0, bytes_per_token=4.0)))
    assert "cross-entropy (nats per token)" in words
    assert "Bits per byte 0.812" in words  # 2.25 / (4 ln 2)


def test_an_unknown_device_says_so(tmp_path):
    run = _run(tmp_path / "run")
    log = run / "metrics.jsonl"
    log.write_text(
        log.read_text().replace(
            '"model_flops_utilization": 0.25', '"model_flops_utilization": null'
        )
    )
    words = _words(report_run(run))
    assert "the peak of this device and precision is unknown" in words
    assert "of the dense BF16 peak" not in words


def test_curves_of_sources_and_phases_are_those_recorded(tmp_path):
    from olmo_trainer.report.of_run import read_run

    _, records = read_run(_run(tmp_path / "run", steps=40))
    history = history_of.gather_history(records, None)
    lines = pictures.draw_sources(history).axes[0].lines
    found = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in lines}
    assert found == {"<code>": [2.5] * 4, "web": [2.0] * 4}
    areas = pictures.draw_phases(history).axes[0].collections
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in areas]
    assert tops == pytest.approx([0.1, 0.25, 0.5])


def test_runs_are_compared_on_one_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = _run(tmp_path / "a" / "run", loss=2.0), _run(tmp_path / "b" / "run", loss=3.0)
    assert main(["report", str(first), str(second)]) == 0
    assert capsys.readouterr().out.strip() == "comparison.html"
    words = _words(tmp_path / "comparison.html")
    assert "a/run 2.25 3.246 30 30.0k 2.00k 25.0%" in words
    assert "b/run 3.25 4.689 30 30.0k 2.00k 25.0%" in words
    assert "optimizer.learning_rate 0.002 0.003" in words
    assert "optimizer.beta1" not in words  # the same in both
    for label in ("training loss (nats per byte)", "held-out loss", "gradient norm"):
        assert label in words


def test_runs_of_other_tokens_say_so(tmp_path):
    runs = [_run(tmp_path / "a"), _run(tmp_path / "b", bytes_per_token=None)]
    assert "nats per token, tokens differ" in _words(write_comparison(tmp_path / "c.html", runs))


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (["none"], "none: no run here"),
        (["run", "none"], "none: no run here"),
        (["run", "run"], "each run must be given once"),
        (["run"] * 7, "needs 2 to 6 runs, got 7"),
    ],
)
def test_wrong_folders_are_named(tmp_path, monkeypatch, capsys, runs, message):
    monkeypatch.chdir(tmp_path)
    _run(tmp_path / "run", steps=1)
    assert main(["report", *runs]) == 2
    assert message in capsys.readouterr().err


def test_a_place_that_takes_no_file_is_named(tmp_path, capsys):
    runs = [str(_run(tmp_path / name, steps=2)) for name in ("a", "b")]
    (tmp_path / "file").touch()
    page = tmp_path / "file" / "page.html"
    assert main(["report", *runs, "--to", str(page)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert str(tmp_path / "file") in error
    assert len(error.splitlines()) == 1
