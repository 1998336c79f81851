"""A batch that grows: every sequence once, in the same order under every layout and resume."""

import io
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_trainer import loop
from olmo_trainer.checkpoint_manifest import CheckpointError, read_manifest
from olmo_trainer.data import BatchWarmup, Share, TrainOrder
from olmo_trainer.metrics import StepRecord, read_metrics
from olmo_trainer.open_data import open_data
from olmo_trainer.overrides import ConfigError, apply_overrides
from olmo_trainer.recipes import nano
from rich.console import Console

GROWING = ("batch.warmup.kind=linear", "batch.warmup.start=2", "batch.warmup.increment=2")
FOUR = ("batch.sequences=8", "batch.accumulation=4", *GROWING, "batch.warmup.steps=5")


@settings(max_examples=60, deadline=None)
@given(
    start=st.integers(1, 9),
    increment=st.integers(1, 7),
    count=st.integers(1, 6),
    extra=st.integers(0, 9),
)
def test_sizes_grow_evenly_and_positions_add_them_up(start, increment, count, extra):
    steps, sequences = count + extra, start + count * increment
    warmup = BatchWarmup(start, increment, steps)
    sizes = [warmup.size(step, sequences) for step in range(steps + 3)]
    assert sizes[0] == start
    assert sizes[steps:] == [sequences] * 3
    lasts = [sizes[:steps].count(start + k * increment) for k in range(count)]
    assert sum(lasts) == steps
    assert max(lasts) - min(lasts) <= 1
    assert sizes == sorted(sizes)
    positions = [warmup.position(step, sequences) for step in range(steps + 4)]
    assert np.diff(positions).tolist() == sizes
    assert positions[0] == 0


def test_every_sequence_comes_once_an_epoch():
    order = TrainOrder([Share(50)], 8, 3, BatchWarmup(2, 2, 5))
    drawn = np.concatenate([order.sequences(step) for step in range(12)])
    assert [len(order.sequences(step)) for step in range(7)] == [2, 2, 4, 4, 6, 8, 8]
    straight = TrainOrder([Share(50)], len(drawn), 3).sequences(0)
    assert np.array_equal(drawn, straight)
    limited = TrainOrder([Share(50, max_passes=1.0)], 8, 3, BatchWarmup(2, 2, 5))
    assert limited.max_steps == 9  # 2 + 2 + 4 + 4 + 6 + 4 * 8 = 50


def test_every_layout_sees_the_same_batch(make_config):
    data = open_data(make_config(*FOUR))
    for step in range(7):
        whole = data.global_batch(step).tokens_BS
        for replicas, accumulation in ((1, 4), (2, 4), (1, 8), (2, 2)):
            if data.order.size(step) % (8 // accumulation):
                with pytest.raises(ValueError, match="must be whole microbatches"):
                    data.microbatches(
                        step, num_replicas=replicas, replica=0, accumulation=accumulation
                    )
                continue
            if replicas * accumulation > 8:
                continue
            parts = [
                batch.tokens_BS
                for replica in range(replicas)
                for batch in data.microbatches(
                    step, num_replicas=replicas, replica=replica, accumulation=accumulation
                )
            ]
            assert {len(part) for part in parts} == {8 // (replicas * accumulation)}
            assert np.array_equal(np.concatenate(parts), whole)


def _train(config, resume=None) -> None:
    loop.train(config, resume=resume, console=Console(file=io.StringIO()))


def test_a_resume_lands_on_the_exact_sample(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(loop._Run, "_conclude", lambda self, heldout, saved: saved)
    config = make_config(*FOUR, "steps=7", "run.save_every=3")
    _train(config)

    def steps(run: str) -> list[StepRecord]:
        records = read_metrics(tmp_path / run / "metrics.jsonl")
        return [
            replace(
                each, seconds=0.0, tokens_per_second=0.0, phase_seconds={}, flops_per_second=None
            )
            for each in records
            if isinstance(each, StepRecord)
        ]

    whole = steps("run")
    sizes = [2, 2, 4, 4, 6, 8, 8]
    tokens = [int((open_data(config).global_batch(s).targets_BS >= 0).sum()) for s in range(7)]
    assert [each.tokens for each in whole] == tokens
    assert tokens[4] > tokens[2] > tokens[0]
    assert tokens[0] <= 32 * sizes[0]
    for before in (3, 6):  # while it grows, and after
        manifest = read_manifest(tmp_path / f"run/checkpoints/step-{before:08d}")
        again = make_config(*FOUR, "steps=7", run=f"after-{before}")
        _train(again, manifest)
        assert steps(f"after-{before}") == whole[before:]
    other = make_config(*FOUR, "batch.warmup.steps=6", "steps=7", run="other")
    with pytest.raises(CheckpointError, match="trained on other data"):
        _train(other, manifest)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["batch.warmup.kind=linear"], "batch.warmup.start: required, not given"),
        (["batch.warmup.start=2"], "batch.warmup.start: no such key for kind = 'none'"),
        (
            [*GROWING, "batch.warmup.steps=9", "batch.sequences=7"],
            r"warmup.start \(2\) plus some times warmup.increment \(2\) must be sequences \(7\)",
        ),
        ([*GROWING, "batch.warmup.steps=2"], r"steps \(2\) must be at least .* increments \(3\)"),
    ],
)
def test_a_wrong_warm_up_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(nano(), settings)


def test_a_warm_up_must_be_whole_microbatches():
    config = apply_overrides(nano(), [*GROWING, "batch.warmup.steps=9", "batch.accumulation=2"])
    with pytest.raises(ValueError, match=r"batch.warmup.start \(2\) must be a multiple .* \(4\)"):
        config.for_world(1)
