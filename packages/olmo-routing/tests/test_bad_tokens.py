"""A NaN or infinity in a real token: reported, without effect on others, never in a gradient."""

import math

import pytest
import torch
from olmo_routing import (
    Router,
    SelectionBias,
    balance_loss,
    margin_balance_loss,
    measure_balance,
    route,
    router_z_loss,
)

T, D, E, K = 9, 16, 6, 2
BAD = 3
CONTENTS = {
    "a NaN": lambda x: x[BAD].put_(torch.tensor([1]), torch.tensor([math.nan])),
    "NaN alone": lambda x: x[BAD].fill_(math.nan),
    "+inf": lambda x: x[BAD].put_(torch.tensor([1]), torch.tensor([math.inf])),
    "+inf and -inf": lambda x: x[BAD, :2].copy_(torch.tensor([math.inf, -math.inf])),
}
OVERFLOW = "numbers whose logits overflow"
LOSSES = {
    "weights": lambda r: (r.weights_TK * torch.arange(1.0, K + 1)).sum(),
    "balance": lambda r: balance_loss(r.scores_TE, r.expert_ids_TK),
    "margin": lambda r: margin_balance_loss(r.scores_TE, r.expert_ids_TK),
    "z": lambda r: router_z_loss(r.logits_TE),
}


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("content", [*CONTENTS, OVERFLOW])
def test_a_bad_token_breaks_no_loss_and_no_gradient(content, dtype, renormalize, gate):
    torch.manual_seed(0)
    bias = SelectionBias(E, 0.1)
    router = Router(D, E, K, gate=gate, renormalize=renormalize, selection_bias=bias)
    x = torch.randn(T, D)
    if content == OVERFLOW:  # one logit is +inf, others are not
        x[BAD] = 3e38 * router.weight_ED.detach()[0].sign()
    else:
        CONTENTS[content](x)
    x = x.to(dtype).requires_grad_()
    routing = router(x)
    assert routing.bad_tokens == 1
    for name, loss_of in LOSSES.items():
        loss = loss_of(routing)
        assert loss.isfinite(), name
        grads = torch.autograd.grad(loss, (x, router.weight_ED), retain_graph=True)
        assert all(grad.isfinite().all() for grad in grads), name
        assert torch.equal(grads[0][BAD], torch.zeros(D, dtype=dtype)), name
        assert grads[0].abs().sum() > 0, name
        assert grads[1].abs().sum() > 0, name
    report = measure_balance(routing.scores_TE, routing.expert_ids_TK)
    assert all(getattr(report, name).isfinite() for name in report.names())


@pytest.mark.parametrize("name", ["weights", "z"])
def test_the_weight_learns_from_the_good_tokens_alone(name):
    torch.manual_seed(0)
    router, x = Router(D, E, K), torch.randn(T, D)
    x[BAD] = math.nan
    good = torch.arange(T) != BAD
    # A bad token counts in the mean of the z-loss.
    scale = {"weights": 1.0, "z": good.sum() / T}[name]
    got, expected = (
        torch.autograd.grad(LOSSES[name](router(tokens)), router.weight_ED)[0]
        for tokens in (x, x[good])
    )
    torch.testing.assert_close(got, scale * expected)


@pytest.mark.parametrize("row", [[math.nan, 0.0, 1.0], [math.inf, 0.0, 1.0], [-math.inf] * 3])
def test_a_row_of_logits_without_a_finite_logsumexp_adds_nothing_to_the_z_loss(row):
    logits = torch.tensor([[0.5, 2.0, -1.0], row, [1.0, 1.0, -math.inf]], dtype=torch.float64)
    logits.requires_grad_()
    loss = router_z_loss(logits)
    finite = torch.logsumexp(logits.detach()[[0, 2]], 1)
    assert loss.item() == pytest.approx(finite.square().sum().item() / 3, rel=1e-12)
    (grad,) = torch.autograd.grad(loss, logits)
    assert torch.equal(grad[1], torch.zeros(3).double())
    assert grad.isfinite().all()
    assert router_z_loss(torch.tensor([row])) == 0
    routing = route(logits, 2)
    assert routing.bad_tokens == (row != [-math.inf] * 3)
