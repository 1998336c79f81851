"""What holds for router, losses, bias and experts together, in a layer as a model has it.

Shapes: T tokens, K experts a token, E experts, D model width.
"""

import io
import math

import pytest
import torch
from olmo_routing import (
    LoadWindow,
    Router,
    SelectionBias,
    balance_loss,
    margin_balance_loss,
    measure_balance,
    plan_rows,
    route,
    route_fractions,
    router_z_loss,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

D, E, K = 6, 8, 2
COEFFICIENTS = {"balance": 0.3, "margin": 0.2, "z": 0.1}


class Layer(nn.Module):
    """A routed layer of linear experts; rows come in the order of `plan_rows`."""

    def __init__(self, *, bias: bool = True, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        chosen = SelectionBias(E, 0.25) if bias else None
        self.router = Router(D, E, K, selection_bias=chosen).double()
        self.experts_EDD = nn.Parameter(torch.randn(E, D, D).double())

    def forward(self, x, mask=None, ids=None):
        routing = self.router(x, mask_T=mask, expert_ids_TK=ids)
        plan = plan_rows(routing.expert_ids_TK, E)
        y, start = torch.zeros_like(x), 0
        for expert, end in enumerate(plan.offsets_E.tolist()):
            routes = plan.routes_R[start:end]
            weights = routing.weights_TK.flatten()[routes]
            rows = weights[:, None] * (x[routes // K] @ self.experts_EDD[expert].T)
            y, start = y.index_add(0, routes // K, rows), end
        return y, routing


def losses_of(routing, mask=None):
    pair = routing.scores_TE, routing.expert_ids_TK
    return {
        "balance": balance_loss(*pair, mask_T=mask),
        "margin": margin_balance_loss(*pair, mask_T=mask),
        "z": router_z_loss(routing.logits_TE, mask_T=mask),
    }


def objective(y, routing, mask=None):
    real = y if mask is None else y[mask]
    auxiliary = losses_of(routing, mask)
    return real.square().mean() + sum(c * auxiliary[name] for name, c in COEFFICIENTS.items())


def tokens(num_tokens, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, D, generator=generator, dtype=torch.float64) + 0.5


@pytest.mark.parametrize("padding", [1, 5, E, 40])
@pytest.mark.parametrize("content", [0.0, 1e3, math.nan])
def test_appended_padding_changes_nothing_anywhere(padding, content):
    layer, x = Layer(), tokens(E)  # as many tokens as experts, where a wrong axis does not raise
    mask = torch.arange(E + padding) < E
    padded = torch.cat([x, torch.full((padding, D), content).double()])
    y, routing = layer(x)
    # A caller whose own experts multiply by NaN would spoil them; rows of padding are never taken.
    y_padded, routing_padded = layer(padded, mask)
    torch.testing.assert_close(y_padded[:E], y)
    assert torch.equal(routing_padded.counts_E, routing.counts_E)
    alone, with_padding = losses_of(routing), losses_of(routing_padded, mask)
    for name in COEFFICIENTS:
        torch.testing.assert_close(with_padding[name], alone[name], rtol=1e-12, atol=0)
    reports = (
        measure_balance(routing.scores_TE, routing.expert_ids_TK),
        measure_balance(routing_padded.scores_TE, routing_padded.expert_ids_TK, mask_T=mask),
    )
    for name in type(reports[0]).names():
        torch.testing.assert_close(getattr(reports[1], name), getattr(reports[0], name), msg=name)
    wanted = torch.autograd.grad(objective(y, routing), list(layer.parameters()))
    got = torch.autograd.grad(objective(y_padded, routing_padded, mask), list(layer.parameters()))
    for have, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-12)
        assert want.abs().sum() > 0
    steps = []
    for counts in (routing.counts_E, routing_padded.counts_E):
        bias = SelectionBias(E, 0.25)
        bias.update(counts)
        steps.append(bias.bias_E)
    assert torch.equal(*steps)


def test_a_mask_is_of_tokens_in_every_function_that_takes_one():
    # Rows to C, A, B, the last one padding: over the wrong axis B would be kept and C dropped.
    logits = torch.tensor([[0.0, 1.0, 9.0], [9.0, 0.0, 2.0], [3.0, 9.0, 0.0]])
    mask, ids = torch.tensor([1, 1, 0]).bool(), torch.tensor([[2], [0], [1]])
    scores, kept = logits.softmax(1), slice(0, 2)
    assert route(logits, 1, mask_T=mask).counts_E.tolist() == [1, 0, 1]
    router = Router(3, 3, 1)
    with torch.no_grad():
        router.weight_ED.copy_(torch.eye(3))
    assert router(logits, mask_T=mask).counts_E.tolist() == [1, 0, 1]
    assert route_fractions(ids, 3, mask_T=mask).tolist() == [[0.5, 0.0, 0.5]]
    assert LoadWindow(3).add(ids, mask_T=mask).tolist() == [[0.5, 0.0, 0.5]]
    for loss_of in (balance_loss, margin_balance_loss):
        torch.testing.assert_close(
            loss_of(scores, ids, mask_T=mask), loss_of(scores[kept], ids[kept])
        )
        assert loss_of(scores, ids, mask_T=mask) != loss_of(scores, ids)
    torch.testing.assert_close(router_z_loss(logits, mask_T=mask), router_z_loss(logits[kept]))
    options = {"kept_ids_TK": torch.tensor([[2], [-1], [1]]), "weights_TK": torch.ones(3, 1)}
    report = measure_balance(scores, ids, mask_T=mask, **options)
    cut = {name: value[kept] for name, value in options.items()}
    expected = measure_balance(scores[kept], ids[kept], **cut)
    for name in type(report).names():
        torch.testing.assert_close(getattr(report, name), getattr(expected, name), msg=name)


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_coefficient_reaches_the_router_in_proportion(name, autocast):
    layer, x = Layer(), tokens(40)

    def gradient(coefficient):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y, routing = layer(x)
            loss = y.square().mean() + coefficient * losses_of(routing)[name]
        return torch.autograd.grad(loss, layer.router.weight_ED)[0]

    without, once, twice = gradient(0.0), gradient(0.7), gradient(1.4)
    assert (once - without).norm() > 1e-3
    torch.testing.assert_close(twice - without, 2 * (once - without), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["balance", "z"])
def test_what_reaches_the_router_is_the_slope_of_what_is_reported(name):
    # `margin_balance_loss` says itself that its gradient is of a surrogate; it has its own tests.
    layer, x = Layer(), tokens(40)
    weight = layer.router.weight_ED
    (gradient,) = torch.autograd.grad(losses_of(layer(x)[1])[name], weight)
    direction = torch.randn(E, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ends = []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            weight.add_(step * direction)
            ends.append(losses_of(layer(x)[1])[name].item())
    assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(
        (gradient * direction).sum().item(), rel=1e-5
    )


@pytest.mark.parametrize("loss_of", [balance_loss, margin_balance_loss])
def test_a_balance_loss_varies_with_the_logits(loss_of):
    values = set()
    for seed in range(5):
        logits = torch.randn(16, E, generator=torch.Generator().manual_seed(seed))
        routing = route(logits, K)
        values.add(loss_of(routing.scores_TE, routing.expert_ids_TK).item())
    assert len(values) == 5


class Model(nn.Module):
    """A dense layer, a balanced one, one without balancing, and a balanced one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.dense = nn.Linear(D, D).double()
        self.routed = nn.ModuleList(
            Layer(bias=bias, seed=seed) for seed, bias in enumerate((True, False, True))
        )

    def forward(self, x, recompute):
        x, counts = torch.tanh(self.dense(x)), []
        for layer in self.routed:
            # Recomputed forwards get the ids of the first, as the README says.
            recorded: list[torch.Tensor] = []

            def block(x, layer=layer, recorded=recorded):
                y, routing = layer(x, ids=recorded[0] if recorded else None)
                recorded.append(routing.expert_ids_TK)
                return torch.tanh(x + y), routing.counts_E

            x, counts_E = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            counts.append(counts_E)
        return x, counts

    def biases(self):
        return [layer.router.selection_bias for layer in self.routed]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_step_moves_exactly_the_balanced_layers_once(recompute, microbatches):
    model, x = Model(), tokens(32)
    sums = [torch.zeros(E, dtype=torch.int64) for _ in model.routed]
    for part in x.chunk(microbatches):
        y, counts = model(part, recompute)
        y.square().sum().backward()
        for total, counts_E in zip(sums, counts, strict=True):
            total += counts_E
    for inspected in (model.train(), model.eval()):
        with torch.no_grad():
            inspected(x, recompute)
    for bias in model.biases():
        assert bias is None or not bias.bias_E.any()  # no forward and no backward moves it
    expected = [
        0.25 * torch.sign(32 * K / E - layer_counts.double()).float()
        for layer_counts in Model()(x, False)[1]
    ]
    for bias, total, want in zip(model.biases(), sums, expected, strict=True):
        assert total.sum() == 32 * K
        if bias is not None:
            bias.update(total)
            assert torch.equal(bias.bias_E, want)
            assert want.any()
    assert [bias is None for bias in model.biases()] == [False, True, False]


def test_the_saved_model_holds_the_live_bias_after_steps():
    model, x = Model(), tokens(32)
    for _ in range(3):
        _, counts = model(x, False)
        for bias, counts_E in zip(model.biases(), counts, strict=True):
            if bias is not None:
                bias.update(counts_E)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    saved = {k: v for k, v in torch.load(file, weights_only=True).items() if "bias_E" in k}
    assert len(saved) == 2
    for bias, held in zip(
        [b for b in model.biases() if b is not None], saved.values(), strict=True
    ):
        assert held.dtype == torch.float32
        assert held.any()
        assert torch.equal(held, bias.bias_E)


@pytest.mark.parametrize("record", [True, False])
def test_a_recomputed_tie_flips_no_gradient_of_layer_or_loss(record):
    # All logits equal; from the second forward on, noise of 1e-7 lets ties fall the other way.
    x = tokens(37)

    def gradients(recompute):
        layer, calls, recorded = Layer(bias=False), [], []
        with torch.no_grad():
            layer.router.weight_ED.zero_()

        def block(x):
            noise = 1e-7 * torch.arange(E)[:, None] if calls else 0.0
            calls.append(1)
            ids = recorded[0] if record and recorded else None
            weight = layer.router.weight_ED + noise
            options = {"expert_ids_TK": ids}
            routing = torch.func.functional_call(layer.router, {"weight_ED": weight}, (x,), options)
            recorded.append(routing.expert_ids_TK)
            weights_TK1 = routing.weights_TK[:, :, None]
            rows = torch.einsum("td,tkfd->tkf", x, layer.experts_EDD[routing.expert_ids_TK])
            # Not the margin loss: its margins are of scores, and which of two equal ones lost is
            # in no id.
            losses = losses_of(routing)
            return (weights_TK1 * rows).sum(1).square().mean() + losses["balance"] + losses["z"]

        loss = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        assert isinstance(loss, torch.Tensor)
        result = torch.autograd.grad(loss, list(layer.parameters()))
        assert len(calls) == 1 + recompute
        return result

    pairs = zip(gradients(True), gradients(False), strict=True)
    same = [torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs]
    assert all(same) == record
