"""The auxiliary losses and what a step counts, in one process."""

import pytest
import torch
from olmo_routing import route
from olmo_trainer.build import Assembly, assemble
from olmo_trainer.data import Batch
from olmo_trainer.mesh import create_mesh
from olmo_trainer.overrides import apply_overrides
from olmo_trainer.recipes import nano
from olmo_trainer.statistics import StepStatistics
from olmo_trainer.step import accumulate_gradients, heldout_loss, update_biases
from olmo_trainer.verify import split_batch

CPU = torch.device("cpu")


def _assembly(*settings: str) -> Assembly:
    config = apply_overrides(nano(), settings).for_world(1)
    return assemble(config, create_mesh(config.layout, CPU))


def _batch(sequences: int = 4, length: int = 24) -> Batch:
    tokens = torch.randint(
        0, 257, (sequences, length + 1), generator=torch.Generator().manual_seed(5)
    )
    mask = torch.ones(sequences, length, dtype=torch.bool)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask)


def _router_gradients(assembly: Assembly) -> torch.Tensor:
    return torch.cat(
        [
            parameter.main_grad.flatten().clone()
            for name, parameter in assembly.parameters
            if "router" in name
        ]
    )


def test_the_auxiliary_gradient_is_linear_in_its_coefficient():
    gradients = {}
    for coefficient in (0.0, 0.5, 1.0):
        assembly = _assembly(f"model.moe.balance_loss={coefficient}", "model.moe.z_loss=0")
        accumulate_gradients(assembly, [_batch()])
        gradients[coefficient] = _router_gradients(assembly)
    once, twice = gradients[0.5] - gradients[0.0], gradients[1.0] - gradients[0.0]
    assert once.norm() > 1e-4
    torch.testing.assert_close(twice, 2 * once, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_z_loss_of_the_head_is_a_mean_over_targets(parts):
    batch = _batch()
    batch.targets_BS[0, :7] = -100  # what has no target counts nowhere
    assembly = _assembly(
        "loss.z_loss=0.5",
        "model.moe.balance_loss=0",
        "model.moe.z_loss=0",
        f"batch.accumulation={parts}",
    )
    with torch.no_grad():
        logits, _ = assembly.stages[0].part(batch.tokens_BS, batch.mask_BS)
    squares = torch.logsumexp(logits.double(), -1).square()
    expected = squares[batch.targets_BS >= 0].mean().item()
    accumulate_gradients(assembly, split_batch(batch, parts), loss_scale=0.0)
    totals = assembly.statistics.totals()
    assert totals.head_z_loss == pytest.approx(expected, rel=1e-5)
    assert totals.auxiliary_loss == pytest.approx(0.5 * expected, rel=1e-5)
    # d mean(lse^2) / d logits = 2 lse softmax(logits) / targets, and the logits are linear in w.
    head = assembly.stages[0].part.head.weight
    hidden = torch.linalg.lstsq(head.double(), logits.double().flatten(0, 1).mT).solution.mT
    lse = torch.logsumexp(logits.double(), -1).flatten()
    weights = torch.where((batch.targets_BS >= 0).flatten(), lse, 0) / (batch.targets_BS >= 0).sum()
    slopes = (weights[:, None] * logits.double().flatten(0, 1).softmax(-1)).mT @ hidden
    torch.testing.assert_close(head.main_grad.double(), slopes, rtol=1e-3, atol=1e-6)


def test_an_evaluation_has_no_z_loss():
    plain, with_z = _assembly(), _assembly("loss.z_loss=0.5")
    assert heldout_loss(plain, [_batch()]) == heldout_loss(with_z, [_batch()])
    assert not with_z.statistics.vector.any()


@pytest.mark.parametrize("name", ["balance_loss", "z_loss"])
def test_the_auxiliary_gradient_is_the_slope_of_what_is_logged(name):
    other = {"balance_loss": "z_loss", "z_loss": "balance_loss"}[name]
    assembly = _assembly(f"model.moe.{name}=1", f"model.moe.{other}=0")
    accumulate_gradients(assembly, [_batch()], loss_scale=0.0)
    # The last router: a small move of an earlier one could change what the later layers select.
    weights = dict(assembly.parameters)["layers.3.feed_forward.router.weight_ED"]
    gradient = weights.main_grad.clone()
    direction = gradient / gradient.norm()
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weights.add_(direction, alpha=sign * 1e-3)
        accumulate_gradients(assembly, [_batch()], loss_scale=0.0)
        values.append(assembly.statistics.totals().auxiliary_loss)
        with torch.no_grad():
            weights.sub_(direction, alpha=sign * 1e-3)
    slope = (values[0] - values[1]) / 2e-3
    assert slope == pytest.approx(float(gradient.norm()), rel=2e-2)


@pytest.mark.parametrize("scope", ["sequence", "microbatch"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_identical_microbatches_give_the_gradient_of_one(scope, parts):
    gradients, logged = [], []
    for count in (1, parts):
        assembly = _assembly(
            f"model.moe.balance_scope={scope}",
            f"batch.accumulation={count}",
            "model.moe.balance_loss=1",
        )
        accumulate_gradients(assembly, [_batch()] * count, loss_scale=0.0)
        gradients.append(_router_gradients(assembly))
        logged.append(assembly.statistics.totals().auxiliary_loss)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)
    assert logged[0] == pytest.approx(logged[1], rel=1e-5)


def test_a_forward_without_gradients_counts_nothing():
    assembly = _assembly()
    accumulate_gradients(assembly, [_batch()])
    before = assembly.statistics.vector.clone()
    biases = {layer: bias.bias_E.clone() for layer, bias in assembly.selection_biases.items()}
    with torch.no_grad():
        stage = assembly.stages[0]
        stage.part(_batch().tokens_BS, _batch().mask_BS)
    assert torch.equal(assembly.statistics.vector, before)
    update_biases(assembly)
    for layer, bias in assembly.selection_biases.items():
        assert not torch.equal(bias.bias_E, biases[layer])


def test_exactly_the_routed_layers_have_a_bias():
    assembly = _assembly("model.num_dense_layers=2")
    assert list(assembly.selection_biases) == [2, 3]
    assert not _assembly("model.moe.bias_rate=0").selection_biases


def test_layers_are_measured_one_by_one():
    # All tokens of one layer go to A, of the other to B: pooled they would look balanced.
    config = apply_overrides(
        nano(), ["model.num_layers=3", "model.moe.num_experts=2", "model.moe.top_k=1"]
    )
    statistics = StepStatistics(config.model, CPU)
    mask, one = torch.ones(6, dtype=torch.bool), torch.tensor(2.0)
    for layer, sign in ((1, 1.0), (2, -1.0)):
        logits = sign * torch.tensor([[30.0, -30.0]]).repeat(6, 1)
        statistics.add_routing(layer, route(logits, 1), mask, one, one, torch.ones(()))
    layers = statistics.layers()
    assert [each.counts for each in layers] == [[6, 0], [0, 6]]
    assert [each.imbalance for each in layers] == [2.0, 2.0]
    assert [each.dead_experts for each in layers] == [1, 1]
    assert [each.balance_loss for each in layers] == [2.0, 2.0]
    assert all(each.honesty == pytest.approx(1.0) for each in layers)


def test_a_batch_of_padding_alone_is_a_finite_nothing():
    assembly = _assembly()
    batch = _batch()
    empty = Batch(
        batch.tokens_BS,
        torch.full_like(batch.targets_BS, -100),
        torch.zeros_like(batch.mask_BS),
    )
    accumulate_gradients(assembly, [empty])
    assert assembly.statistics.totals().loss == 0
    assert all(not parameter.main_grad.any() for _, parameter in assembly.parameters)
