"""The numbers of each layer may be written in some steps only; the report takes what there is."""

import dataclasses
import io
import random
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from olmo_trainer import loop
from olmo_trainer.metrics import MetricsLog, RunHeader, StepRecord, read_metrics
from olmo_trainer.report import of_run, pictures
from olmo_trainer.report.history import gather_history
from olmo_trainer.report.of_run import read_run, report_run
from rich.console import Console


def _record(step: int) -> StepRecord:
    draw = random.Random(step)
    counts = [[draw.randrange(1, 60) for _ in range(4)] for _ in range(3)]
    imbalance = [4 * max(row) / sum(row) for row in counts]
    return StepRecord(
        **dict.fromkeys(("loss", "balance_loss", "z_loss", "grad_norm", "seconds"), 1.0 + 1 / step),
        **dict.fromkeys(("auxiliary_loss", "learning_rate", "tokens_per_second"), 0.1),
        step=step,
        tokens=100,
        dropped=step,
        routes=sum(map(sum, counts)),
        worst_imbalance=max(imbalance),
        expert_counts=counts,
        imbalance=imbalance,
        honesty=[0.5] * 3,
        entropy_deficit=[0.1] * 3,
        dead_experts=[0] * 3,
        balance={"topk_margin": [float(step)] * 3},
    )


def _write(folder: Path, records: list[StepRecord]) -> Path:
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.write(RunHeader(step=0, info={"config": {}}))
        for record in records:
            log.write(record)
    return folder


def test_a_run_writes_them_at_the_first_the_last_and_every_nth_step(make_config, tmp_path):
    said = io.StringIO()

    def train(every: int) -> list[StepRecord]:
        config = make_config(
            "steps=7", "run.log_every=1", f"run.layers_every={every}", run=f"{every}"
        )
        loop.train(config, resume=None, console=Console(file=said, width=200))
        records = read_metrics(tmp_path / f"{every}" / "metrics.jsonl")
        return [each for each in records if isinstance(each, StepRecord)]

    whole, sparse = train(1), train(3)
    assert said.getvalue().count("load ") == 14  # a person is told of every step
    for full, part in zip(whole, sparse, strict=True):
        expected = full if full.step in (1, 3, 6, 7) else full.without_layers()
        for name in ("expert_counts", "imbalance", "balance", "z_losses", "worst_imbalance"):
            assert getattr(part, name) == getattr(expected, name), (full.step, name)
        assert part.routes == sum(map(sum, full.expert_counts)) > 0
    sizes = [(tmp_path / name / "metrics.jsonl").stat().st_size for name in ("1", "3")]
    assert sizes[0] - sizes[1] > 3 * 1000  # three steps of three layers


def test_the_report_draws_layers_at_the_steps_that_wrote_them(tmp_path):
    whole = [_record(step) for step in range(1, 41)]
    kept = {1, *range(5, 41, 5)}
    sparse = [each if each.step in kept else each.without_layers() for each in whole]
    history = gather_history(sparse, None)
    everything = gather_history(whole, None)
    places = [step - 1 for step in sorted(kept)]
    assert history.layer_steps.tolist() == sorted(kept)
    assert history.steps.tolist() == everything.steps.tolist()
    for name in ("counts", "imbalance", "honesty", "entropy_deficit"):
        assert np.array_equal(getattr(history, name), getattr(everything, name)[places]), name
    assert np.array_equal(history.balance["topk_margin"], everything.balance["topk_margin"][places])
    for name, values in everything.values.items():  # what sums layers up is there for each step
        assert np.array_equal(history.values[name], values, equal_nan=True), name
    curves = pictures.draw_imbalance(history).axes[0].lines
    assert np.asarray(curves[0].get_xdata()).tolist() == sorted(kept)
    page = report_run(_write(tmp_path, sparse)).read_text("utf-8")
    assert "MoE layer 3" in " ".join(ElementTree.fromstring(page).itertext())


def test_a_report_without_any_numbers_of_layers_says_so(tmp_path):
    records = [_record(step).without_layers() for step in range(1, 4)]
    page = report_run(_write(tmp_path, records)).read_text("utf-8")
    words = " ".join(ElementTree.fromstring(page).itertext())
    assert "No step has written numbers of layers yet." in words or "no mixture-of-experts" in words


def test_an_older_log_without_the_sum_of_routes_tells_dropped_parts_too():
    old = [dataclasses.replace(_record(step), routes=None) for step in (1, 2, 3)]
    new = [_record(step) for step in (1, 2, 3)]
    parts = [gather_history(each, None).values["dropped_part"] for each in (old, new)]
    assert np.array_equal(*parts)
    assert (parts[0] > 0).all()


@pytest.mark.parametrize("steps", [1, 5, 8, 9, 10, 17, 40, 65])
def test_a_reader_keeps_layers_of_evenly_many_steps(tmp_path, monkeypatch, steps):
    monkeypatch.setattr(of_run, "MOST_OF_LAYERS", 8)
    _, records = read_run(_write(tmp_path, [_record(step) for step in range(1, steps + 1)]))
    found = [each for each in records if isinstance(each, StepRecord)]
    assert [each.step for each in found] == list(range(1, steps + 1))
    kept = [each.step for each in found if each.expert_counts]
    stride = 1
    while len(range(1, steps + 1, stride)) > 8:
        stride *= 2
    assert kept == sorted({*range(1, steps + 1, stride), steps})
    for each in found:
        expected = _record(each.step)
        assert each == (expected if each.step in kept else expected.without_layers())
