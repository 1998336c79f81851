"""The packages meet in tensors: what one makes, the next one understands."""

import pytest
import torch
from olmo_distopt import GradientReducer, ReplicaGroups, ShardedAdamW
from olmo_ep_comm import create_dispatcher
from olmo_experts_gemm import Experts, grouped_mm, moe_mlp, swiglu_experts
from olmo_mxfp8 import mx_grouped_mm
from olmo_routing import Router, SelectionBias, admit, measure_balance, plan_rows, route

T, D, H, E, K = 37, 32, 64, 6, 2


@pytest.fixture
def layer():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(T, D, generator=generator)
    mask = torch.rand(T, generator=generator) > 0.2
    logits = torch.randn(T, E, generator=generator)
    logits[:, 4] = -50.0  # an expert without tokens
    experts = Experts(E, D, H)
    experts.reset_parameters(generator=generator)
    return x, mask, route(logits, K, mask_T=mask, route_scale=float(K)), experts


def test_routing_words(layer):
    _, mask, routing, _ = layer
    assert routing.expert_ids_TK.dtype == torch.int64
    assert routing.weights_TK.dtype == routing.scores_TE.dtype == torch.float32
    assert routing.counts_E.dtype == torch.int32
    assert routing.counts_E.sum() == K * mask.sum()
    assert (routing.expert_ids_TK[~mask] == -1).all()
    assert (routing.weights_TK[~mask] == 0).all()
    assert routing.counts_E[4] == 0


def test_a_row_plan_is_the_order_of_the_dispatcher(layer):
    x, _, routing, _ = layer
    plan = plan_rows(routing.expert_ids_TK, E)
    sent = create_dispatcher("local", num_experts=E).dispatch(
        x, routing.expert_ids_TK, routing.weights_TK
    )
    assert torch.equal(plan.offsets_E, sent.offsets_E)
    assert plan.offsets_E.dtype == torch.int32
    assert torch.equal(plan.offsets_E, routing.counts_E.cumsum(0).to(torch.int32))
    rows = int(plan.offsets_E[-1])
    routes = plan.routes_R[:rows]
    assert torch.equal(sent.rows_RD[:rows], x[routes // K])
    assert torch.equal(sent.row_weights_R[:rows], routing.weights_TK.flatten()[routes])
    routed = routing.expert_ids_TK >= 0
    assert torch.equal(plan.rows_TK[routed], torch.argsort(routes))


def test_dispatch_experts_combine_equals_the_local_layer(layer):
    x, _, routing, experts = layer
    dispatcher = create_dispatcher("local", num_experts=E)
    gradients = []
    for through_dispatcher in (False, True):
        x_TD = x.clone().requires_grad_()
        weights = routing.weights_TK.clone().requires_grad_()
        experts.zero_grad()
        if through_dispatcher:
            sent = dispatcher.dispatch(x_TD, routing.expert_ids_TK, weights)
            rows = experts(sent.rows_RD, sent.offsets_E, row_weights_R=sent.row_weights_R)
            y = dispatcher.combine(rows, sent.handle)
        else:
            y = moe_mlp(
                x_TD, routing.expert_ids_TK, weights, experts.w_gate_up_E2HD, experts.w_down_EDH
            )
        y.square().sum().backward()
        gradients.append((y.detach(), x_TD.grad, weights.grad, experts.w_down_EDH.grad.clone()))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert ours.abs().max() > 0


def test_a_quantised_product_slots_into_the_experts(layer):
    x, _, routing, experts = layer
    plan = plan_rows(routing.expert_ids_TK, E)
    rows = x[plan.routes_R[: int(plan.offsets_E[-1])] // K].requires_grad_()
    plain = swiglu_experts(rows, experts.w_gate_up_E2HD, experts.w_down_EDH, plan.offsets_E)
    quantised = swiglu_experts(
        rows, experts.w_gate_up_E2HD, experts.w_down_EDH, plan.offsets_E, matmul=mx_grouped_mm
    )
    error = (quantised - plain).norm() / plain.norm()
    assert 1e-4 < error < 0.1
    quantised.sum().backward()
    gradient = experts.w_gate_up_E2HD.grad
    assert gradient[4].count_nonzero() == 0
    assert gradient[0].abs().max() > 0


def test_capacity_counts_become_offsets(layer):
    x, _, routing, _ = layer
    kept = admit(routing.counts_E.view(1, 1, E).long(), 20, policy="fair")
    assert kept.sum() == 20
    offsets = kept[0, 0].cumsum(0).to(torch.int32)
    w = torch.randn(E, 8, D)
    assert grouped_mm(x, w, offsets).shape == (T, 8)


def test_counts_drive_the_bias_and_the_report(layer):
    _, mask, routing, _ = layer
    bias = SelectionBias(E, 0.5)
    bias.update(routing.counts_E)
    assert bias.bias_E[4] == 0.5
    assert bias.bias_E[routing.counts_E.argmax()] == -0.5
    report = measure_balance(routing.scores_TE, routing.expert_ids_TK, mask_T=mask)
    assert report.dead_experts == 1
    counts = routing.counts_E.float()
    assert report.imbalance == pytest.approx(float(counts.max() / counts.mean()))


def test_a_layer_of_all_parts_trains():
    generator = torch.Generator().manual_seed(0)
    router = Router(D, E, K, route_scale=float(K))
    experts = Experts(E, D, H)
    experts.reset_parameters(generator=generator)
    torch.nn.init.normal_(router.weight_ED, std=0.1, generator=generator)
    dispatcher = create_dispatcher("local", num_experts=E)
    named = [
        *((f"router.{name}", each) for name, each in router.named_parameters()),
        *((f"experts.{name}", each) for name, each in experts.named_parameters()),
    ]
    groups = ReplicaGroups({"alone": None}, lambda name, parameter: "alone")
    optimizer = ShardedAdamW(named, groups, lr=3e-3)
    reducer = GradientReducer(named, groups)
    x = torch.randn(64, D, generator=generator)
    target = torch.randn(64, D, generator=generator)
    losses = []
    for _ in range(30):
        reducer.zero()
        routing = router(x)
        sent = dispatcher.dispatch(x, routing.expert_ids_TK, routing.weights_TK)
        rows = experts(sent.rows_RD, sent.offsets_E, row_weights_R=sent.row_weights_R)
        loss = (dispatcher.combine(rows, sent.handle) - target).square().mean()
        loss.backward()
        reducer.reduce()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
