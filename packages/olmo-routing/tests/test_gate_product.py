"""The gate's product: float32 whatever autocast says, and no float32 copy kept for backward."""

import pytest
import torch
from olmo_routing import Router
from torch.nn import functional as F

T, D, E = 33, 64, 8
MASK = torch.arange(T) % 5 > 0


def kept_for_backward(function):
    """Return the tensors that the graph of the function's result holds."""
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function()
    return kept, result


@pytest.mark.parametrize("mask", [None, MASK])
def test_backward_keeps_the_tokens_as_they_came(mask):
    router = Router(D, E, 2)
    x = torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True)
    kept, routing = kept_for_backward(lambda: router(x, mask_T=mask))
    wide = [tensor for tensor in kept if tensor.shape == (T, D)]
    assert wide  # the tokens themselves
    assert all(tensor.data_ptr() == x.data_ptr() for tensor in wide)
    assert all(tensor.dtype == torch.bfloat16 for tensor in wide)
    routing.weights_TK[:, 0].sum().backward()


def test_the_plain_way_would_keep_a_float32_copy():
    x = torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(E, D, requires_grad=True)
    kept, _ = kept_for_backward(lambda: F.linear(x.float(), weight))
    assert any(tensor.shape == (T, D) and tensor.dtype == torch.float32 for tensor in kept)


def plain_logits(router, x, mask):
    exact = x.float() if mask is None else torch.where(mask[:, None], x.float(), 0.0)
    return F.linear(exact, router.weight_ED.float())


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bit_for_bit_what_a_kept_copy_gives_also_under_autocast(mask, dtype, weight_dtype):
    router = Router(D, E, 2, dtype=weight_dtype)
    x = torch.randn(T, D).to(dtype).requires_grad_()
    slopes = torch.randn(T, E)
    inputs = (x, router.weight_ED)
    expected = torch.autograd.grad((plain_logits(router, x, mask) * slopes).sum(), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = router(x, mask_T=mask).logits_TE
        # Here backward runs under autocast too, as where a trainer wraps the whole step.
        got = torch.autograd.grad((logits * slopes).sum(), inputs)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, plain_logits(router, x, mask))
    for each, want in zip(got, expected, strict=True):
        assert each.dtype == want.dtype
        assert torch.equal(each, want)


@pytest.mark.parametrize("trained", ["tokens", "weight"])
def test_only_what_is_asked_for_gets_a_gradient(trained):
    router = Router(D, E, 2).requires_grad_(trained == "weight")
    x = torch.randn(T, D, requires_grad=trained == "tokens")
    router(x).logits_TE.square().sum().backward()
    assert (x.grad is not None) == (trained == "tokens")
    assert (router.weight_ED.grad is not None) == (trained == "weight")


def test_gradients_of_first_and_second_order():
    router = Router(3, 4, 2).double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def logits(x, weight):
        module = {"weight_ED": weight}
        mask = torch.arange(5) < 4
        return torch.func.functional_call(router, module, (x,), {"mask_T": mask}).logits_TE.sin()

    weight = router.weight_ED.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(logits, (x, weight))
    assert torch.autograd.gradgradcheck(logits, (x, weight))


def test_the_op_tells_torch_the_truth_about_itself():
    x = torch.randn(5, 3, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 3, requires_grad=True)
    for mask in (None, torch.arange(5) < 3):
        torch.library.opcheck(torch.ops.olmo_routing.gate_product, (x, weight, mask))
