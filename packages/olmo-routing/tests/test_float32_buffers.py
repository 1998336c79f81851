"""The modules that sum over steps stay float32, whatever the model or a checkpoint is of."""

import copy
import math

import pytest
import torch
from olmo_routing import GerrymanderAlarm, Router, SelectionBias, measure_load
from torch import nn

COUNTS = torch.tensor([200_000, 70_000, 70_000, 60_000])  # beyond what float16 can hold


def move_bias(bias):
    bias.update(COUNTS)


def feed_alarm(alarm):
    alarm.update([measure_load(COUNTS, torch.linspace(2.0, 3.0, 4))])


MODULES = {
    "SelectionBias": (lambda: SelectionBias(4, 0.001), move_bias, "bias_E"),
    "GerrymanderAlarm": (lambda: GerrymanderAlarm(4, window=20), feed_alarm, "history_4WL"),
}
CONVERSIONS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to("cpu", torch.bfloat16),
}


def equal(a, b):
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("convert", CONVERSIONS)
@pytest.mark.parametrize("name", MODULES)
def test_a_model_of_another_precision_keeps_every_step(name, convert):
    make, step, buffer = MODULES[name]
    module, reference = make(), make()
    for each in (module, reference):
        step(each)
    model = CONVERSIONS[convert](nn.ModuleList([module, nn.Linear(2, 2)]))
    assert model[1].weight.dtype != torch.float32
    for each in (module, reference):
        step(each)
    assert equal(getattr(module, buffer), getattr(reference, buffer))
    assert getattr(copy.deepcopy(module).to("meta"), buffer).is_meta


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float64, torch.float32])
@pytest.mark.parametrize("name", MODULES)
def test_a_checkpoint_of_another_precision_loads_as_float32(name, saved, assign):
    make, step, buffer = MODULES[name]
    source = make()
    step(source)
    state = {f"0.{key}": value.to(saved) for key, value in source.state_dict().items()}
    before = {key: value.clone() for key, value in state.items()}
    module, reference = make(), make()
    nn.ModuleList([module]).load_state_dict(state, assign=assign)
    assert all(equal(state[key], value) for key, value in before.items())
    getattr(reference, buffer).copy_(before[f"0.{buffer}"])
    assert equal(getattr(module, buffer), getattr(reference, buffer))
    for each in (module, reference):
        step(each)
    assert equal(getattr(module, buffer), getattr(reference, buffer))


def test_steps_of_the_bias_are_not_lost_beside_one_in_bfloat16():
    bias = SelectionBias(4, 0.001)
    bias.load_state_dict({"bias_E": torch.ones(4, dtype=torch.bfloat16)}, assign=True)
    for _ in range(3):
        bias.update(COUNTS)
    torch.testing.assert_close(bias.bias_E, torch.tensor([0.997, 1.003, 1.003, 1.003]))


def test_the_alarm_rings_in_a_half_model_as_in_a_float32_one():
    alarms = [GerrymanderAlarm(4, window=20), GerrymanderAlarm(4, window=20).half()]
    rung = [[], []]
    for alarm, seen in zip(alarms, rung, strict=True):
        for _ in range(20):
            report = measure_load(COUNTS, torch.tensor([1.0, 1.0, 1.0, 1.2]))
            seen.append(bool(alarm.update([report])))
    assert rung[0] == rung[1]
    assert rung[0][-1]
    assert alarms[1].history_4WL.max() == COUNTS.sum() < math.inf


def test_only_the_own_buffers_are_kept():
    router = Router(3, 4, 2, selection_bias=SelectionBias(4, 0.1)).half()
    assert router.weight_ED.dtype == torch.float16
    missing, unexpected = router.load_state_dict({"x": torch.ones(1)}, strict=False)
    assert sorted(missing) == ["selection_bias.bias_E", "weight_ED"]
    assert unexpected == ["x"]
