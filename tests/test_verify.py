"""No layout changes the numbers: the heart of the project, and that its check can fail."""

import copy

import pytest
import torch
from olmo_trainer.config import InterleavedOneFOneB, LayoutConfig
from olmo_trainer.local_ranks import run_local_ranks
from olmo_trainer.overrides import apply_overrides
from olmo_trainer.recipes import nano
from olmo_trainer.verify import (
    ACCUMULATIONS,
    LAYOUTS,
    SCENARIOS,
    Case,
    Measured,
    compare,
    layouts_for,
    make_scenario,
    verify,
)


def _explain(verdicts) -> str:
    return "\n".join(f"{each.case}: {fault}" for each in verdicts for fault in each.faults)


@pytest.mark.dist
def test_every_layout_gives_the_numbers_of_one_process():
    verdicts = verify(nano())
    assert len(verdicts) == len(LAYOUTS) * len(ACCUMULATIONS) * len(SCENARIOS)
    assert not any(each.faults for each in verdicts), _explain(verdicts)


@pytest.mark.dist
def test_interleaved_pipeline_sigmoid_gate_and_a_stage_without_routed_layers():
    config = apply_overrides(
        nano(),
        [
            "model.num_dense_layers=2",
            "model.moe.gate=sigmoid",
            "model.moe.bias_rate=0",
            "loss.z_loss=0.1",
        ],
    )
    layout = LayoutConfig(pipeline=2, schedule=InterleavedOneFOneB(chunks=2))
    interleaved = config.model_copy(update={"layout": layout})
    verdicts = verify(config, [(1, 1, 2), (2, 2, 2)], [3])
    verdicts += verify(interleaved, [(1, 1, 2), (2, 1, 2)], [3])
    assert not any(each.faults for each in verdicts), _explain(verdicts)


@pytest.mark.dist
@pytest.mark.parametrize(
    "settings",
    [
        ["model.num_dense_layers=4"],
        ["model.moe.top_k=4", "model.moe.z_loss=0"],
        ["model.moe.shared_hidden=0", "model.moe.balance_loss=0"],
    ],
    ids=["no routed layer", "every expert selected", "no shared expert"],
)
def test_a_model_without_some_part_is_compared_all_the_same(settings):
    verdicts = verify(apply_overrides(nano(), settings), [(2, 1, 1)], [1])
    assert not any(each.faults for each in verdicts), _explain(verdicts)


def test_a_layout_that_cannot_divide_is_refused():
    config = apply_overrides(nano(), ["model.moe.num_experts=3", "model.moe.top_k=1"])
    with pytest.raises(ValueError, match=r"layout.expert \(2\) must divide"):
        verify(config, [(2, 2, 1)])


def test_context_layouts_that_cannot_divide_are_left_out_unless_asked_for():
    config = nano()
    assert layouts_for(config) == list(LAYOUTS)
    for setting in ("data.sequence_length=15", "model.attention.num_heads=3"):
        config = apply_overrides(nano(), ["model.attention.num_kv_heads=1", setting])
        assert layouts_for(config) == [each for each in LAYOUTS if each.context == 1]
        with pytest.raises(ValueError, match=r"layout.context \(2\) must divide"):
            verify(config, [(1, 1, 1, 2)])


def _reference() -> Measured:
    generator = torch.Generator().manual_seed(0)
    names = ("head.weight", "layers.1.feed_forward.experts.w_down_EDH", "layers.1.router.weight")
    gradients = {name: torch.randn(4, 6, generator=generator) for name in names}
    return Measured(
        loss=5.0,
        auxiliary=0.02,
        norm=3.0,
        gradients=gradients,
        auxiliary_gradients={name: 0.01 * each for name, each in gradients.items()},
        biases={1: torch.tensor([0.1, -0.1])},
        counts={1: torch.tensor([3, 4])},
    )


def _scale_one(measured: Measured) -> None:
    measured.gradients["layers.1.feed_forward.experts.w_down_EDH"] *= 2


def _swap_experts(measured: Measured) -> None:
    name = "layers.1.feed_forward.experts.w_down_EDH"
    measured.gradients[name] = measured.gradients[name].flip(0)


def _lose_auxiliary(measured: Measured) -> None:
    for gradient in measured.auxiliary_gradients.values():
        gradient.mul_(0.5)


def _poison(measured: Measured) -> None:
    measured.gradients["head.weight"][0, 0] = float("nan")


def _drop(measured: Measured) -> None:
    del measured.gradients["head.weight"]


def _set(name: str, value: object):
    return lambda measured: setattr(measured, name, value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_scale_one, "w_down_EDH: ratio 2.0000"),
        (_swap_experts, "gradient of layers.1.feed_forward.experts.w_down_EDH"),
        (_lose_auxiliary, "gradient of the auxiliary losses: ratio 0.5000"),
        (_poison, "gradient of head.weight: ratio nan"),
        (_drop, "parameters"),
        (_set("loss", 5.001), "loss: deviates by 2.00e-04"),
        (_set("loss", float("nan")), "loss: deviates by nan"),
        (_set("auxiliary", 0.04), "auxiliary loss: deviates"),
        (_set("norm", 6.0), "gradient norm: deviates by 1.00e"),
        (_set("biases", {1: torch.tensor([0.1, 0.1])}), "selection bias: differs by 2.00e-01"),
        (_set("counts", {1: torch.tensor([4, 3])}), "expert counts differ"),
    ],
)
def test_the_comparison_catches(fault, message):
    measured = copy.deepcopy(_reference())
    assert not compare(Case((1, 1, 1), 1, "ragged"), measured, _reference()).faults
    fault(measured)
    faults = compare(Case((1, 1, 1), 1, "ragged"), measured, _reference()).faults
    assert any(message in each for each in faults), faults


def test_scenarios_hurt_as_they_say():
    from olmo_trainer.data import Batch

    tokens = torch.arange(12 * 64).view(12, 64) % 257
    batch = Batch(tokens, tokens + 1, torch.ones_like(tokens, dtype=torch.bool))
    ragged, silent = (make_scenario(batch, name, pad_id=0) for name in SCENARIOS)
    per_sequence = ragged.mask_BS.sum(1)
    assert len({int(part.sum()) for part in per_sequence.chunk(6)}) == 6
    assert per_sequence.chunk(6)[4].sum() == 0
    assert silent.mask_BS[:6].sum() == 0
    assert silent.mask_BS[6:].sum() > 0
    assert ((ragged.targets_BS >= 0) <= ragged.mask_BS).all()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise ValueError('planted')", r"local rank 1 failed: (.|\n)*ValueError: planted"),
        ("import os; os._exit(3)", "local rank 1 failed: died without an answer"),
    ],
)
def test_a_failing_rank_is_reported_and_nobody_hangs(fault, message):
    # `exec` is a function that every process can import.
    code = f"import torch.distributed as d\nif d.get_rank() == 1: {fault}\nd.barrier()"
    with pytest.raises(RuntimeError, match=message):
        run_local_ranks(exec, 2, code)


def test_a_silent_rank_is_named():
    with pytest.raises(RuntimeError, match=r"local ranks \[0\] did not answer within 0.5 s"):
        run_local_ranks(exec, 1, "import time; time.sleep(60)", timeout=0.5)
