"""The router module: precision, masks, recomputation and forced routing."""

import itertools
from typing import Any

import pytest
import torch
from olmo_routing import Router, SelectionBias, route
from torch import nn
from torch.utils.checkpoint import checkpoint


def test_is_route_of_a_linear_gate():
    torch.manual_seed(0)
    options = {"gate": "sigmoid", "route_scale": 2.0, "num_groups": 4, "topk_groups": 2}
    bias = SelectionBias(8, 0.1)
    bias.bias_E.normal_()
    router = Router(5, 8, 3, **options, selection_bias=bias).double()
    x = torch.randn(11, 5, dtype=torch.float64)
    routing = router(x)
    expected = route(x @ router.weight_ED.T, 3, **options, bias_E=bias.bias_E)
    assert torch.equal(routing.expert_ids_TK, expected.expert_ids_TK)
    torch.testing.assert_close(routing.weights_TK, expected.weights_TK)
    torch.testing.assert_close(routing.logits_TE, expected.logits_TE)
    assert torch.autograd.gradcheck(lambda t: router(t).weights_TK, (x.requires_grad_(),))


@pytest.mark.parametrize("autocast", [False, True])
def test_the_gate_is_float32_in_a_bfloat16_model(autocast):
    torch.manual_seed(0)
    router = Router(64, 8, 2, dtype=torch.bfloat16)
    x = torch.randn(33, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        routing = router(x)
    oracle = x.double() @ router.weight_ED.double().T
    assert routing.logits_TE.dtype == torch.float32
    torch.testing.assert_close(routing.logits_TE.double(), oracle, rtol=1e-5, atol=1e-5)
    routing.weights_TK[:, 0].sum().backward()
    assert router.weight_ED.grad is not None
    assert router.weight_ED.grad.dtype == torch.bfloat16
    assert router.weight_ED.grad.abs().sum() > 0
    assert x.grad is not None


def test_padding_of_nan_reaches_no_gradient():
    torch.manual_seed(0)
    router = Router(6, 4, 2)
    x = torch.randn(7, 6)
    mask = torch.tensor([1, 0, 1, 1, 0, 1, 1]).bool()
    poisoned = torch.where(mask[:, None], x, torch.nan).requires_grad_()
    (expected,) = torch.autograd.grad(router(x[mask]).weights_TK[:, 0].sum(), router.weight_ED)
    routing = router(poisoned, mask_T=mask)
    routing.weights_TK[:, 0].sum().backward()
    assert router.weight_ED.grad is not None
    torch.testing.assert_close(router.weight_ED.grad, expected)
    assert poisoned.grad is not None
    assert torch.equal(poisoned.grad[~mask], torch.zeros(2, 6))
    assert routing.counts_E.sum() == 10


def test_no_tokens():
    router = Router(6, 4, 2)
    for mask in (None, torch.zeros(0).bool()):
        routing = router(torch.zeros(0, 6), mask_T=mask, force=None)
        routing.weights_TK.sum().backward()
        assert routing.expert_ids_TK.shape == (0, 2)
        assert routing.counts_E.tolist() == [0] * 4
    assert router.weight_ED.grad is not None
    assert torch.equal(router.weight_ED.grad, torch.zeros(4, 6))


class FlippingLayer(nn.Module):
    """Experts with one scalar weight each; from the second forward on, ties fall the other way."""

    def __init__(self, *, record: bool):
        super().__init__()
        self.router = Router(4, 8, 2)
        nn.init.zeros_(self.router.weight_ED)
        self.expert_E = nn.Parameter(torch.arange(1.0, 9.0))
        self.calls = itertools.count()
        self.record = record
        self.ids_TK = None

    def forward(self, x):
        noise = 1e-7 * torch.arange(8.0)[:, None] * min(next(self.calls), 1)
        weight = self.router.weight_ED + noise
        given = self.ids_TK if self.record else None
        routing = torch.func.functional_call(
            self.router, {"weight_ED": weight}, (x,), {"expert_ids_TK": given}
        )
        self.ids_TK = routing.expert_ids_TK
        return (routing.weights_TK * self.expert_E[routing.expert_ids_TK]).sum()


@pytest.mark.parametrize("record", [True, False])
def test_a_recomputed_forward_routes_as_the_first(record):
    x = torch.rand(37, 4)

    def gradients(recompute):
        layer = FlippingLayer(record=record)
        loss = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        assert isinstance(loss, torch.Tensor)
        result = torch.autograd.grad(loss, list(layer.parameters()))
        assert next(layer.calls) == 1 + recompute  # it did run again
        return result

    pairs = list(zip(gradients(True), gradients(False), strict=True))
    same = [torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs]
    assert all(same) == record  # without the record the ties do flip, and this test can fail


def test_recorded_ids_give_bitwise_the_same_routing():
    router = Router(5, 6, 2, gate="sigmoid")
    x, mask = torch.randn(9, 5), torch.arange(9) % 3 > 0
    first = router(x, mask_T=mask)
    again = router(x, mask_T=mask, expert_ids_TK=first.expert_ids_TK)
    unmasked = router(x, expert_ids_TK=first.expert_ids_TK)
    for name in ("expert_ids_TK", "weights_TK", "scores_TE", "counts_E"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert torch.equal(first.weights_TK, unmasked.weights_TK)


def test_a_forward_never_moves_the_bias():
    bias = SelectionBias(4, 0.5)
    router = Router(3, 4, 1, selection_bias=bias)
    for training in (True, False):
        router.train(training)(torch.randn(8, 3))
    assert torch.equal(bias.bias_E, torch.zeros(4))
    bias.update(torch.tensor([5, 3, 2, 2]))
    assert router.state_dict()["selection_bias.bias_E"].tolist() == [-0.5, 0.0, 0.5, 0.5]


@pytest.mark.parametrize("visit", ["every module", "the router alone"])
def test_starts_from_the_meta_device(visit):
    with torch.device("meta"):
        router = Router(3, 400, 2, selection_bias=SelectionBias(400, 0.1))
    assert all(tensor.is_meta for tensor in router.state_dict().values())
    router.to_empty(device="cpu")
    for tensor in router.state_dict().values():
        tensor.fill_(torch.nan)  # what fresh memory may hold
    modules: list[Any] = list(router.modules()) if visit == "every module" else [router]
    for module in modules:
        module.reset_parameters()
    state = router.state_dict()
    assert torch.equal(state["selection_bias.bias_E"], torch.zeros(400))
    assert state["selection_bias.bias_E"].dtype == torch.float32
    assert state["weight_ED"].abs().max() <= 3**-0.5
    assert state["weight_ED"].std() == pytest.approx(1 / 3, rel=0.1)  # 2 / sqrt(3) / sqrt(12)
    assert router(torch.randn(5, 3)).counts_E.sum() == 10


def test_reset_parameters_needs_no_bias_and_a_new_router_keeps_the_bias_given():
    router = Router(3, 4, 2)
    before = router.weight_ED.detach().clone()
    router.reset_parameters()
    assert not torch.equal(router.weight_ED, before)
    bias = SelectionBias(4, 0.5)
    bias.update(torch.tensor([5, 3, 2, 2]))
    Router(3, 4, 2, selection_bias=bias)
    assert bias.bias_E.tolist() == [-0.5, 0.0, 0.5, 0.5]


def test_forced_uniform_is_even_over_real_tokens():
    router = Router(3, 6, 4)
    x, mask = torch.randn(13, 3), torch.rand(13, generator=torch.Generator().manual_seed(1)) < 0.6
    assert 0 < mask.sum() < 13
    for routing, real in (
        (router(x, force="uniform"), 13),
        (router(x, force="uniform", mask_T=mask), int(mask.sum())),
    ):
        assert routing.counts_E.sum() == 4 * real
        assert routing.counts_E.max() - routing.counts_E.min() <= 1
        for row in routing.expert_ids_TK.tolist():
            assert row == [-1] * 4 or len(set(row)) == 4


def test_forced_random_is_distinct_seeded_and_weighed_by_the_gate():
    router = Router(3, 6, 4)
    x = torch.randn(50, 3)
    first, again = (
        router(x, force="random", generator=torch.Generator().manual_seed(7)) for _ in range(2)
    )
    assert torch.equal(first.expert_ids_TK, again.expert_ids_TK)
    assert all(len(set(row)) == 4 for row in first.expert_ids_TK.tolist())
    assert (first.counts_E > 0).all()
    assert not torch.equal(first.expert_ids_TK, router(x).expert_ids_TK)
    logits = first.logits_TE.gather(1, first.expert_ids_TK)
    torch.testing.assert_close(first.weights_TK, torch.softmax(logits, 1))


def test_forced_random_is_even_in_a_default_dtype_of_low_precision():
    router = Router(3, 64, 2, dtype=torch.float32)
    x = torch.randn(20000, 3)
    torch.set_default_dtype(torch.bfloat16)
    try:
        counts = router(x, force="random", generator=torch.Generator().manual_seed(0)).counts_E
    finally:
        torch.set_default_dtype(torch.float32)
    # 625 routes an expert, of standard deviation 25.
    assert (counts - 625).abs().max() < 5 * 25


def test_jitter_is_off_by_default():
    router, x = Router(4, 6, 2), torch.randn(50, 4)
    assert router.training
    assert torch.equal(router(x).logits_TE, router.eval()(x).logits_TE)


def test_jittered_gradients_are_those_of_the_jittered_input():
    router, x = Router(4, 6, 2, jitter=0.3), torch.randn(50, 4, requires_grad=True)
    mask = torch.arange(50) < 40
    poisoned = torch.where(mask[:, None], x, torch.nan)
    logits = router(poisoned, mask_T=mask, generator=torch.Generator().manual_seed(3)).logits_TE
    noise = torch.empty(50, 4).uniform_(0.7, 1.3, generator=torch.Generator().manual_seed(3))
    expected = torch.where(mask[:, None], x * noise, 0.0) @ router.weight_ED.T
    torch.testing.assert_close(logits, expected)
    inputs = (x, router.weight_ED)
    got = torch.autograd.grad(logits.square().sum(), inputs)
    for each, want in zip(got, torch.autograd.grad(expected.square().sum(), inputs), strict=True):
        torch.testing.assert_close(each, want, rtol=1e-4, atol=1e-4)


def test_jitter_is_of_training_alone():
    router = Router(4, 6, 2, jitter=0.1)
    x = torch.ones(200, 4)
    with torch.no_grad():
        router.weight_ED.copy_(torch.eye(6, 4))  # the logits show the jittered input
    seen = router(x).logits_TE[:, :4]
    assert seen.min() >= 0.9 - 1e-6
    assert seen.max() <= 1.1 + 1e-6
    assert seen.std() > 0.04  # uniform: 0.2 / sqrt(12) = 0.058
    assert torch.equal(router.eval()(x).logits_TE[:, :4], x)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"top_k": 9}, ValueError, r"`top_k` must be in \[1, `num_experts`=8\], got 9"),
        ({"d_model": 0}, ValueError, "`d_model` must be at least 1, got 0"),
        ({"num_experts": 0}, ValueError, "`num_experts` must be at least 1, got 0"),
        ({"jitter": 1.0}, ValueError, r"`jitter` must be in \[0, 1\), got 1.0"),
        (
            {"selection_bias": SelectionBias(7, 0.1)},
            ValueError,
            "`selection_bias` must be of `num_experts`=8 experts, got 7",
        ),
    ],
)
def test_messages_of_the_constructor(arguments, error, message):
    with pytest.raises(error, match=message):
        Router(**{"d_model": 3, "num_experts": 8, "top_k": 2, **arguments})


IDS = torch.zeros(5, 2).long()


@pytest.mark.parametrize(
    ("x", "arguments", "error", "message"),
    [
        (torch.zeros(5, 4), {}, ValueError, r"`x_TD` must be of width `d_model`=3, got .*\(5, 4\)"),
        (torch.zeros(1, 5, 3), {}, ValueError, "`x_TD` must have two dimensions"),
        (torch.zeros(5, 3).long(), {}, TypeError, "`x_TD` must be a floating-point tensor"),
        (torch.zeros(5, 3), {"mask_T": torch.ones(5)}, TypeError, "`mask_T` must be bool"),
        (torch.zeros(5, 3), {"force": "even"}, ValueError, "`force` must be None or one of .*even"),
        (
            torch.zeros(5, 3),
            {"force": "uniform", "expert_ids_TK": IDS},
            ValueError,
            "`force` must be None when `expert_ids_TK` is given",
        ),
        (torch.zeros(4, 3), {"expert_ids_TK": IDS}, ValueError, r"must have shape \(4, 2\), got"),
        (torch.zeros(5, 3), {"expert_ids_TK": IDS.int()}, TypeError, "must be int64, got"),
        (
            torch.zeros(5, 3),
            {"expert_ids_TK": IDS + 8},
            ValueError,
            r"`expert_ids_TK` must be in \[-1, 8\), .*got ids from 8 to 8",
        ),
    ],
)
def test_messages_of_the_forward(x, arguments, error, message):
    with pytest.raises(error, match=message):
        Router(3, 8, 2)(x, **arguments)


def test_every_part_must_be_on_the_device_of_the_tokens():
    bias = SelectionBias(8, 0.1).to("meta")
    with pytest.raises(ValueError, match=r"`selection_bias` must be on the device .*cpu, got meta"):
        Router(3, 8, 2, selection_bias=bias)(torch.zeros(5, 3))
    with pytest.raises(ValueError, match=r"the router must be on the device .*cpu, got meta"):
        Router(3, 8, 2, device="meta")(torch.zeros(5, 3))
