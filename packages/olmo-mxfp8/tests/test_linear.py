"""`MXLinear` as a drop-in for `nn.Linear`, and never with a stale weight."""

import copy

import pytest
import torch
from olmo_mxfp8 import MXLinear, MXRecipe, mx_linear
from torch import nn


def test_computes_the_quantised_product_and_its_gradients():
    layer = MXLinear(64, 96, bias=True)
    x = torch.randn(2, 5, 64, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, mx_linear(x, layer.weight) + layer.bias)
    dy = torch.randn_like(y)
    dw, db = torch.autograd.grad(y, (layer.weight, layer.bias), dy)
    torch.testing.assert_close(db, dy.sum((0, 1)))
    gradient = dy.double().flatten(0, 1).T @ x.detach().double().flatten(0, 1)
    assert (dw - gradient).norm() < 0.03 * gradient.norm()
    assert (y - nn.functional.linear(x, layer.weight, layer.bias)).norm() < 0.04 * y.norm()


@pytest.mark.parametrize("bias", [False, True])
def test_starts_and_saves_as_nn_linear(bias):
    torch.manual_seed(3)
    plain = nn.Linear(64, 32, bias=bias)
    torch.manual_seed(3)
    layer = MXLinear(64, 32, bias=bias)
    assert isinstance(layer, nn.Linear)
    assert list(layer.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(layer.state_dict()[name], value)
    nn.Linear(64, 32, bias=bias).load_state_dict(layer.state_dict())
    layer.load_state_dict(nn.Linear(64, 32, bias=bias).state_dict())


def test_from_linear_shares_parameters_mode_and_device():
    linear = nn.Linear(32, 64, dtype=torch.bfloat16).eval()
    recipe = MXRecipe(element="e5m2")
    layer = MXLinear.from_linear(linear, recipe)
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
    assert (layer.in_features, layer.out_features, layer.training) == (32, 64, False)
    assert layer.recipe == recipe
    assert MXLinear.from_linear(nn.Linear(32, 32, bias=False)).bias is None
    assert MXLinear.from_linear(layer).recipe == MXRecipe()
    assert "recipe=MXRecipe(element='e5m2'" in repr(layer)


def test_never_uses_a_stale_weight():
    """After a step, a load, an edit, and a change of mode the output is that of a fresh layer."""
    layer = MXLinear(64, 32)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    x = torch.randn(7, 64)

    def check(previous):
        fresh = MXLinear.from_linear(copy.deepcopy(nn.Linear(64, 32, bias=False)))
        fresh.load_state_dict(layer.state_dict())
        y = layer(x)
        assert torch.equal(y, fresh(x))
        assert not torch.equal(y, previous)
        return y.detach()

    y = layer(x).detach()
    for _ in range(3):
        layer(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        y = check(y)
    layer.load_state_dict(nn.Linear(64, 32, bias=False).state_dict())
    y = check(y)
    with torch.no_grad():
        layer.weight[3] *= -2
    y = check(y)
    layer.weight.data.mul_(3)
    y = check(y)
    layer.weight = nn.Parameter(torch.randn(32, 64))
    y = check(y)
    assert torch.equal(layer.eval()(x), y)
    assert torch.equal(layer.train()(x), y)


def test_a_cached_weight_is_the_weight_or_an_error():
    plain, layer = MXLinear(64, 32), MXLinear(64, 32, cached=True)
    layer.load_state_dict(plain.state_dict())
    assert list(layer.state_dict()) == ["weight"]
    x = torch.randn(7, 64)
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(copy.deepcopy(layer)(x), plain(x))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer(x).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="this `WeightCache` is stale"):
        layer(x)
    layer.refresh()
    assert torch.equal(layer(x), MXLinear.from_linear(layer)(x))
    shared = MXLinear.from_linear(plain, cached=True)
    assert torch.equal(shared(x), plain(x))
    assert "cached=True" in repr(shared)
    layer.weight = nn.Parameter(torch.randn(32, 64))
    with pytest.raises(ValueError, match=r"`cache` must be that of `w`.*`refresh\(\)`"):
        layer(x)


def test_eval_and_train_leave_a_cached_weight_as_it_is():
    """Neither hides an edit, which both modes see as stale, and neither quantises anew."""
    layer = MXLinear(64, 32, cached=True)
    x = torch.randn(7, 64)
    y, cache = layer(x), layer.cache_of("weight")
    for mode in (layer.eval, layer.train):
        assert torch.equal(mode()(x), y)
        assert layer.cache_of("weight") is cache
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer(x).sum().backward()
    optimizer.step()
    for mode in (layer.eval, layer.train):
        with pytest.raises(RuntimeError, match="this `WeightCache` is stale"):
            mode()(x)
    layer.refresh()
    fresh = MXLinear.from_linear(layer)(x)
    assert not torch.equal(fresh, y)
    for mode in (layer.eval, layer.train):
        assert torch.equal(mode()(x), fresh)


def test_input_gradient_uses_the_live_weight():
    layer = MXLinear(64, 32)
    for _ in range(2):
        x = torch.randint(-7, 8, (4, 64)).float().requires_grad_()
        with torch.no_grad():
            layer.weight.copy_(torch.randint(-7, 8, (32, 64)))
        dy = torch.randint(-7, 8, (4, 32)).float()
        (dx,) = torch.autograd.grad(layer(x), x, dy)
        assert torch.equal(dx, dy @ layer.weight)


def test_mixed_dtypes():
    layer = MXLinear(32, 64, bias=True)
    y = layer(torch.randn(3, 32, dtype=torch.bfloat16))
    dw, db = torch.autograd.grad(y.float().sum(), (layer.weight, layer.bias))
    assert y.dtype == torch.bfloat16
    assert dw.dtype == db.dtype == torch.float32
    half = MXLinear(32, 64, bias=True, dtype=torch.bfloat16)
    assert half(torch.randn(3, 32)).dtype == torch.float32


def test_copies_keep_the_recipe():
    layer = MXLinear(32, 32, recipe=MXRecipe(element="e5m2"))
    copied = copy.deepcopy(layer)
    x = torch.randn(3, 32)
    assert copied.recipe == layer.recipe
    assert torch.equal(copied(x), layer(x))
    assert not torch.equal(layer(x), MXLinear.from_linear(layer)(x))


@pytest.mark.parametrize(
    ("widths", "granularity", "message"),
    [
        ((44, 64), 32, "`in_features` must be a multiple of 32 .* got 44; zero-pad it to 64"),
        ((64, 44), 32, "`out_features` must be a multiple of 32 .* got 44"),
        ((96, 128), 128, "`in_features` must be a multiple of 128 .* got 96; zero-pad it to 128"),
    ],
)
def test_widths_that_do_not_divide(widths, granularity, message):
    recipe = MXRecipe(granularity=granularity)
    with pytest.raises(ValueError, match=message):
        MXLinear(*widths, recipe=recipe)
    with pytest.raises(ValueError, match=message):
        MXLinear.from_linear(nn.Linear(*widths), recipe)
