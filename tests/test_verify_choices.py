"""No choice changes the numbers, or by no more than its bound; and the check can fail."""

import copy
import math

import pytest
import torch
from olmo_trainer.cli import main
from olmo_trainer.overrides import apply_overrides
from olmo_trainer.recipes import nano
from olmo_trainer.verify import Measured, check_config
from olmo_trainer.verify_choices import (
    CHOICES,
    Choice,
    ChoiceVerdict,
    choice_config,
    judge,
    verify_choices,
)

# Keys of two heads fill a block of MXFP8.
WIDE = ("model.attention.num_kv_heads=2",)


@pytest.mark.dist
def test_every_choice_is_as_one_process_or_near():
    verdicts, unfit = verify_choices(apply_overrides(nano(), WIDE))
    assert not unfit
    assert len(verdicts) == len(CHOICES)
    found = [f"{each.choice.name}: {fault}" for each in verdicts for fault in each.faults]
    assert not found, "\n".join(found)
    # A bound that nothing comes near would hold anything.
    assert all(each.distance > 0 for each in verdicts if each.choice.bound is not None)


def test_what_does_not_fit_is_said_and_left_out():
    choices = [each for each in CHOICES if each.name in ("mxfp8 attention", "schedule v_shape")]
    small = apply_overrides(nano(), ["model.num_layers=2"])
    verdicts, unfit = verify_choices(small, choices)
    assert verdicts == []
    assert "head_dim (16) must be a multiple of 32" in unfit["mxfp8 attention"]
    assert "num_layers (2) must be at least" in unfit["schedule v_shape"]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda each: f"{each.name} {each.layout}")
def test_a_choice_is_the_configuration_it_names(choice):
    plain = check_config(apply_overrides(nano(), WIDE))
    tree = choice_config(plain, choice).model_dump(mode="json")
    for setting in choice.settings:
        key, _, value = setting.partition("=")
        node = tree
        for part in key.split("."):
            node = node[part]
        found = ",".join(node) if isinstance(node, list) else node
        assert str(found) == value or found == float(value), key
    assert tree["batch"]["accumulation"] == 3
    assert (
        math.prod(tree["layout"][name] for name in ("data", "context", "pipeline")) == choice.world
    )


def _measured() -> Measured:
    generator = torch.Generator().manual_seed(0)
    gradients = {name: torch.randn(4, 6, generator=generator) for name in ("a", "b")}
    return Measured(
        loss=5.0,
        auxiliary=0.02,
        norm=7.0,
        gradients=gradients,
        auxiliary_gradients={name: 0.01 * each for name, each in gradients.items()},
        biases={1: torch.tensor([0.1, -0.1])},
        counts={1: torch.tensor([3, 4])},
        updates={name: 1e-3 * each for name, each in gradients.items()},
    )


SAME = Choice("same", (), updates=True)
NEAR = Choice("near", (), bound=0.3)
PACKED = Choice("packed", (), bound=0.3, keeps_forward=True)


def _noise(measured: Measured, size: float) -> None:
    for each in measured.gradients.values():
        each += size * torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def _scale(measured: Measured, size: float) -> None:
    for each in measured.gradients.values():
        each *= size


def _flip(measured: Measured, _: float) -> None:
    measured.updates["b"] = -measured.updates["b"]


def _count(measured: Measured, size: float) -> None:
    measured.counts[1] = torch.tensor([4, 3])
    measured.loss += size


@pytest.mark.parametrize(
    ("choice", "fault", "size", "message"),
    [
        (SAME, _noise, 1e-3, "gradient of a: ratio"),
        (SAME, _flip, 0.0, "update of b: ratio -1.0000, distance 2.0e+00"),
        (NEAR, _noise, 0.05, None),
        (NEAR, _noise, 0.5, "is above 0.3"),
        (NEAR, _scale, 1.2, "gradient: ratio 1.2000"),
        (NEAR, _count, 0.01, None),
        (NEAR, _count, 1.0, "loss: deviates by 2.00e-01"),
        (PACKED, _noise, 0.05, None),
        (PACKED, _count, 0.0, "expert counts differ"),
    ],
)
def test_the_judge_catches(choice, fault, size, message):
    measured = copy.deepcopy(_measured())
    assert not judge(choice, measured, _measured()).faults
    fault(measured, size)
    faults = judge(choice, measured, _measured()).faults
    if message is None:
        assert not faults
    else:
        assert any(message in each for each in faults), faults


@pytest.mark.parametrize("fault", [(), ("gradient: ratio 2.0000",)], ids=["good", "bad"])
def test_the_command_says_and_returns_what_was_found(monkeypatch, capsys, fault):
    found = [ChoiceVerdict(NEAR, 5.5, 1.0, 0.03, ()), ChoiceVerdict(SAME, 5.5, 1.0, 0.0, fault)]
    monkeypatch.setattr("olmo_trainer.verify.verify", lambda config: [])
    monkeypatch.setattr(
        "olmo_trainer.verify_choices.verify_choices",
        lambda config: (found, {"mxfp8 attention": "too narrow"}),
    )
    assert main(["verify", "nano"]) == bool(fault)
    out = capsys.readouterr().out
    near, same = (line.split() for line in out.splitlines() if line.startswith(("near ", "same ")))
    assert near == [
        *["near", "1", "1", "1", "1"],
        *["ragged", "5.500000"],
        *["1.00000", "3.0e-02", "0.3", "near"],
    ]
    assert same[-2:] == ["-", "differs" if fault else "same"]
    assert "mxfp8 attention: not compared, it does not fit: too narrow" in out
    assert ("same: gradient: ratio 2.0000" in out) == bool(fault)
    assert ("1 of 2 choices differ" in out) == bool(fault)
