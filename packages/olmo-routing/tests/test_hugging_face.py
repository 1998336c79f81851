"""`Router` beside the routers of `transformers`: equal experts, weights and gradients."""

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from olmo_routing import Router, SelectionBias

D, E, K, T = 12, 16, 4, 50


@pytest.fixture(scope="module")
def transformers():
    """Absent it skips; one that cannot be imported fails."""
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    return import_module("transformers")


def make_router(transformers, family, **options):
    """One of theirs with random weights, from the smallest config that it takes."""
    sizes = {"hidden_size": D, "num_experts_per_tok": K, "num_hidden_layers": 1}
    config = getattr(transformers, f"{family}Config")(**sizes, **options)
    modules = {"Olmoe": "olmoe", "Qwen3Moe": "qwen3_moe", "DeepseekV3": "deepseek_v3"}
    module = import_module(f"transformers.models.{modules[family]}.modeling_{modules[family]}")
    name = "DeepseekV3TopkRouter" if family == "DeepseekV3" else f"{family}TopKRouter"
    router = getattr(module, name)(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.copy_(torch.randn(E, D, generator=generator) / 2)
        for buffer in router.buffers():
            buffer.copy_(0.2 * torch.randn(E, generator=generator))
    return router


def by_id(ids_TK, weights_TK):
    """In the order of the ids: not all of theirs come best first."""
    order_TK = ids_TK.argsort(dim=1)
    return ids_TK.gather(1, order_TK), weights_TK.gather(1, order_TK)


def assert_equal_routing(theirs, ours):
    with torch.no_grad():
        ours.weight_ED.copy_(theirs.weight)
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    logits, weights, ids = theirs(x)
    routing = ours(x)
    torch.testing.assert_close(routing.logits_TE, logits)
    want_ids, want = by_id(ids, weights)
    got_ids, got = by_id(routing.expert_ids_TK, routing.weights_TK)
    assert torch.equal(got_ids, want_ids)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-7)
    g_TK = torch.randn(T, K, generator=torch.Generator().manual_seed(2))
    (d_theirs,) = torch.autograd.grad(want, theirs.weight, g_TK)
    (d_ours,) = torch.autograd.grad(got, ours.weight_ED, g_TK)
    torch.testing.assert_close(d_ours, d_theirs, rtol=1e-4, atol=1e-5)
    assert d_theirs.abs().max() > 0.01
    return routing


@pytest.mark.parametrize("family", ["Olmoe", "Qwen3Moe"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_olmoe_and_qwen3(transformers, family, renormalize):
    theirs = make_router(transformers, family, num_experts=E, norm_topk_prob=renormalize)
    routing = assert_equal_routing(theirs, Router(D, E, K, renormalize=renormalize))
    total_T = routing.weights_TK.detach().sum(1)
    assert (total_T.sub(1).abs().max() < 1e-6) == renormalize


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("groups", "topk_groups"), [(1, 1), (4, 2), (8, 3)])
def test_deepseek_v3(transformers, groups, topk_groups, renormalize):
    theirs = make_router(
        transformers,
        "DeepseekV3",
        n_routed_experts=E,
        n_group=groups,
        topk_group=topk_groups,
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
    )
    bias = SelectionBias(E, rate=0.001)
    bias.bias_E.copy_(theirs.e_score_correction_bias)
    assert bias.bias_E.abs().max() > 0.1
    ours = Router(
        D,
        E,
        K,
        gate="sigmoid",
        renormalize=renormalize,
        route_scale=2.5,
        num_groups=groups,
        topk_groups=topk_groups,
        selection_bias=bias,
    )
    routing = assert_equal_routing(theirs, ours)
    # The bias and the groups do choose: without them other experts are best.
    best = routing.scores_TE.topk(K, dim=1).indices.sort(dim=1).values
    assert not torch.equal(best, routing.expert_ids_TK.sort(dim=1).values)
