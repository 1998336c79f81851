"""The alarm over a window: a loss that falls while the load gets worse, and nothing else."""

import copy
import io

import pytest
import torch
from olmo_routing import GerrymanderAlarm, measure_balance
from torch import nn


def run(alarm, losses, imbalances):
    """Return whether the alarm was on after each step."""
    return [
        alarm.update(torch.tensor(loss), torch.tensor(imbalance)).tolist()
        for loss, imbalance in zip(losses, imbalances, strict=True)
    ]


def line(start, end, steps=40):
    return torch.linspace(start, end, steps).tolist()


@pytest.mark.parametrize(
    ("losses", "imbalances", "alarmed"),
    [
        (line(1.5, 1.1), line(2.0, 4.0), True),  # gerrymandering on its way
        (line(1.5, 1.1), line(4.0, 2.0), False),  # balancing
        (line(1.1, 1.5), line(2.0, 4.0), False),  # an honest loss of a collapse
        (line(1.5, 1.1), line(2.0, 2.0), False),
        (line(1.2, 1.2), line(2.0, 4.0), False),
        (line(1.101, 1.1), line(2.0, 4.0), False),  # too little to call it falling
        (line(1.5, 1.1), line(2.0, 2.05), False),  # too little to call it rising
    ],
)
def test_a_trend_of_both_is_the_alarm(losses, imbalances, alarmed):
    on = run(GerrymanderAlarm(20), losses, imbalances)
    assert on == [False] * 19 + [alarmed] * 21


def test_noise_is_no_trend():
    generator = torch.Generator().manual_seed(0)
    losses = (1.1 + 0.02 * torch.randn(600, generator=generator)).tolist()
    imbalances = (2.5 + 0.2 * torch.randn(600, generator=generator)).tolist()
    assert not any(run(GerrymanderAlarm(), losses, imbalances))


def test_below_one_on_uneven_routes_is_the_alarm_at_once():
    scores = torch.tensor([[1.0, 0.0]] * 2 + [[0.4, 0.6]] * 4)
    report = measure_balance(scores, torch.tensor([[0]] * 2 + [[1]] * 4))
    assert GerrymanderAlarm(20).update(report.balance_loss, report.imbalance)
    even = torch.tensor(0.9), torch.tensor(1.0)
    assert not GerrymanderAlarm(20).update(*even)


def test_a_step_that_is_not_a_number_mutes_the_trend_for_a_window():
    alarm = GerrymanderAlarm(10)
    losses, imbalances = line(1.9, 1.1, 60), line(2.0, 9.0, 60)
    losses[30] = float("nan")
    on = run(alarm, losses, imbalances)
    assert on == [False] * 9 + [True] * 21 + [False] * 10 + [True] * 20


def test_layers_are_watched_one_by_one():
    alarm = GerrymanderAlarm(10, shape=(3,))
    pairs = zip(line(1.5, 1.1), line(2.0, 4.0), strict=True)
    on = torch.zeros(3).bool()
    for loss, imbalance in pairs:
        on = alarm.update(torch.tensor([loss, 1.2, 0.9]), torch.tensor([imbalance, 3.0, 1.5]))
    assert on.tolist() == [True, False, True]


def test_a_resumed_alarm_goes_on_where_it_was():
    losses, imbalances = line(1.5, 1.1), line(2.0, 4.0)
    alarm = GerrymanderAlarm(20)
    run(alarm, losses[:15], imbalances[:15])
    file = io.BytesIO()
    torch.save(alarm.state_dict(), file)
    file.seek(0)
    fresh = GerrymanderAlarm(20)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for each in (copy.deepcopy(alarm), fresh):
        assert run(each, losses[15:], imbalances[15:]) == [False] * 4 + [True] * 21
    alarm.reset_parameters()
    assert run(alarm, losses[15:30], imbalances[15:30]) == [False] * 15


def test_starts_from_the_meta_device_and_stays_small():
    with torch.device("meta"):
        alarm = GerrymanderAlarm(4)
    alarm.to_empty(device="cpu")
    alarm.reset_parameters()
    assert alarm.history_2WL.isnan().all()
    assert isinstance(alarm, nn.Module)
    assert "window=4, shape=()" in repr(alarm)


def test_messages():
    with pytest.raises(ValueError, match="`window` must be at least 2, got 1"):
        GerrymanderAlarm(1)
    with pytest.raises(ValueError, match=r"`least_fall` must be finite and at least 0, got -1"):
        GerrymanderAlarm(least_fall=-1)
    with pytest.raises(ValueError, match=r"`imbalance` must have shape \(2,\), got \(3,\)"):
        GerrymanderAlarm(shape=(2,)).update(torch.zeros(2), torch.zeros(3))
