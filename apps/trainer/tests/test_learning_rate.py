"""The rate of every update, and that a stop and a resume leave no mark on it."""

import io
from itertools import pairwise

import pytest
from olmo_trainer import loop
from olmo_trainer.checkpoint_manifest import read_manifest
from olmo_trainer.learning_rate import describe_bend, learning_rate
from olmo_trainer.metrics import StepRecord, read_metrics
from olmo_trainer.overrides import ConfigError, apply_overrides
from olmo_trainer.recipes import nano
from olmo_trainer.step import accumulate_gradients
from rich.console import Console

WARM = ("optimizer.learning_rate=1", "schedule.warmup_steps=4", "schedule.final_fraction=0.1")
KINDS = {
    "cosine": ("schedule.kind=cosine",),
    "linear": ("schedule.kind=linear",),
    "wsd": ("schedule.kind=wsd", "schedule.decay_fraction=0.4"),
    "wsd by the root": ("schedule.kind=wsd", "schedule.decay=square_root"),
}


def _rates(*settings: str, steps: int = 10) -> list[float]:
    config = apply_overrides(nano(), [*settings, *WARM, f"steps={steps}"])
    return [learning_rate(config, step) for step in range(steps)]


@pytest.mark.parametrize("kind", KINDS)
def test_up_to_the_peak_and_down_to_the_end(kind):
    rates = _rates(*KINDS[kind])
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]  # the first update is step 1 of the warm-up
    assert rates[4] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in pairwise(rates[3:]))


def test_a_run_that_goes_on_with_other_steps_says_how_its_rate_bends():
    before = apply_overrides(nano(), [*WARM, "steps=4000"])
    assert describe_bend(before, before, 137) == []
    (words,) = describe_bend(before, before.model_copy(update={"steps": 150}), 137)
    assert words.startswith("learning rate 0.115 at the next step, 0.998 as it was going")
    assert words.endswith("of all steps, 150 (before: 4000)")
    # Of another kind of schedule nothing need change yet.
    wsd = apply_overrides(nano(), [*WARM, "schedule.kind=wsd", "steps=4000"])
    assert describe_bend(wsd, wsd.model_copy(update={"steps": 5000}), 137) == []


def test_the_shapes():
    assert _rates(*KINDS["cosine"], steps=9)[6] == pytest.approx(0.55)  # half the way from 4 to 8
    assert _rates(*KINDS["linear"], steps=9)[5] == pytest.approx(1 - 0.9 / 4)
    wsd = _rates(*KINDS["wsd"])
    assert wsd[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert wsd[6:] == pytest.approx([1 - 0.9 / 4, 0.55, 1 - 2.7 / 4, 0.1])
    root = _rates("schedule.kind=wsd", "schedule.decay_fraction=0.4", "schedule.decay=square_root")
    assert root[6:] == pytest.approx([0.55, 1 - 0.9 * 0.5**0.5, 1 - 0.9 * 0.75**0.5, 0.1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 2, 4, 5, 6])
def test_a_short_run_is_all_right(kind, steps):
    rates = _rates(*KINDS[kind], steps=steps)
    assert rates[: min(steps, 4)] == [0.25, 0.5, 0.75, 1.0][: min(steps, 4)]
    assert all(0.1 <= rate <= 1 for rate in rates)


def test_without_warm_up_the_first_update_is_at_the_peak():
    config = apply_overrides(nano(), [*WARM[:1], "schedule.warmup_steps=0"])
    assert learning_rate(config, 0) == 1.0


def test_an_old_key_says_where_it_went():
    with pytest.raises(ConfigError, match=r"did you mean schedule.warmup_steps"):
        apply_overrides(nano(), ["optimizer.warmup_steps=3"])
    with pytest.raises(ConfigError, match="decay_fraction: no such key for kind = 'cosine'"):
        apply_overrides(nano(), ["schedule.decay_fraction=0.3"])


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_rate_and_decay_of_every_update_survive_a_resume(make_config, tmp_path, monkeypatch, kind):
    """Resume at the end of the warm-up, in the decay, and before the last step."""
    seen: dict[str, list[float]] = {}
    used: list[float] = []

    def measure(assembly, batches, **options):
        """Silence an expert: without a gradient its weights shrink by `lr * weight_decay`."""
        for bias in assembly.selection_biases.values():
            bias.bias_E[-1] = -1e4
        weights = dict(assembly.parameters)["layers.1.feed_forward.experts.w_down_EDH"][-1]
        used.append(float(weights.detach().double().norm()))
        accumulate_gradients(assembly, batches, **options)

    def train(run: str, steps_before: int | None) -> None:
        settings = (
            *("optimizer.learning_rate=0.01", "optimizer.weight_decay=5", "steps=7"),
            *("schedule.warmup_steps=2", *KINDS[kind], "run.save_every=2"),
        )
        used.clear()
        manifest = None
        if steps_before is not None:
            manifest = read_manifest(tmp_path / f"whole/checkpoints/step-{steps_before:08d}")
        console = Console(file=io.StringIO())
        loop.train(make_config(*settings, run=run), resume=manifest, console=console)
        seen[run] = [1 - later / earlier for earlier, later in pairwise(used)]

    monkeypatch.setattr(loop, "accumulate_gradients", measure)
    monkeypatch.setattr(loop._Run, "_conclude", lambda self, heldout, saved: saved)
    train("whole", None)
    logged = [
        each.learning_rate
        for each in read_metrics(tmp_path / "whole" / "metrics.jsonl")
        if isinstance(each, StepRecord)
    ]
    assert seen["whole"] == pytest.approx([5 * rate for rate in logged[:-1]], rel=1e-3)
    for before in (2, 4, 6):
        train(f"after-{before}", before)
        assert seen[f"after-{before}"] == seen["whole"][before:]
        again = read_metrics(tmp_path / f"after-{before}" / "metrics.jsonl")
        rates = [each.learning_rate for each in again if isinstance(each, StepRecord)]
        assert rates == logged[before:]
