"""The rules by name of olmo-distopt know what olmo-experts-gemm calls its parameters."""

import pytest
import torch
from olmo_distopt import ReplicaGroups, ShardedAdamW, ShardedMuon
from olmo_experts_gemm import Experts

E, D, H = 3, 8, 4
ALONE = ReplicaGroups({"alone": None}, lambda name, parameter: "alone")
WEIGHTS = {"w_gate_up_E2HD", "w_down_EDH"}
BIASES = {"b_gate_up_E2H", "b_down_ED"}


@pytest.mark.parametrize("prefix", ["", "blocks.0.experts."])
@pytest.mark.parametrize("make", [ShardedAdamW, ShardedMuon])
@pytest.mark.parametrize("activation", ["swiglu", "relu_squared"])
def test_stacked_biases_neither_decay_nor_are_orthogonalised(make, prefix, activation):
    experts = Experts(E, D, H, bias=True, activation=activation)
    named = {prefix + name: each for name, each in experts.named_parameters()}
    assert set(named) == {prefix + name for name in WEIGHTS | BIASES}
    assert all(named[prefix + name].ndim == 2 for name in BIASES), "a rule by shape decays them"
    before = {name: each.detach().clone() for name, each in named.items()}
    optimizer = make(named.items(), ALONE, lr=1.0, weight_decay=0.1)
    for each in named.values():
        vars(each)["main_grad"] = torch.zeros_like(each)
    optimizer.step()
    for name in BIASES:
        assert torch.equal(named[prefix + name], before[prefix + name]), name
        assert f"exp_avg.{prefix}{name}" in optimizer.state_dict()
    for name in WEIGHTS:
        want = before[prefix + name] * 0.9
        torch.testing.assert_close(named[prefix + name].detach(), want, rtol=1e-6, atol=0)
        kind = "momentum" if make is ShardedMuon else "exp_avg"
        assert f"{kind}.{prefix}{name}" in optimizer.state_dict()
