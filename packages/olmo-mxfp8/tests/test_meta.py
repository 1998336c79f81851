"""Shapes without values: layers on the meta device, and layers that come from there."""

import pytest
import torch
from olmo_mxfp8 import (
    MXExperts,
    MXLinear,
    MXRecipe,
    mx_grouped_mm,
    quantize,
    scaled_grouped_mm,
    scaled_mm,
)

META = torch.device("meta")
RECIPES = [MXRecipe(), MXRecipe(granularity=128, weight_grad="mxfp8", saved="mxfp8")]
HUGE = 2**33  # rows, more than an int32 counts


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("cached", [False, True])
def test_layers_give_shapes_and_dtypes(recipe, cached):
    options = {"recipe": recipe, "cached": cached, "device": META, "dtype": torch.bfloat16}
    x = torch.empty(HUGE, 128, device=META, requires_grad=True)
    ends = torch.empty(3, dtype=torch.int32, device=META)
    for layer, arguments, width in (
        (MXLinear(128, 256, **options), (x,), 256),
        (MXExperts(3, 128, 256, **options), (x, ends), 128),
    ):
        y = layer(*arguments)
        assert (y.shape, y.dtype, y.device) == ((HUGE, width), torch.float32, META)
        gradients = torch.autograd.grad(y.sum(), (x, *layer.parameters()))
        for gradient, leaf in zip(gradients, (x, *layer.parameters()), strict=True):
            assert (gradient.shape, gradient.dtype) == (leaf.shape, leaf.dtype)


def test_products_give_shapes():
    a, b = quantize(torch.empty(5, 64, device=META)), quantize(torch.empty(3, 32, 64, device=META))
    ends = torch.empty(3, dtype=torch.int32, device=META)
    assert scaled_grouped_mm(a, b, ends).shape == (5, 32)
    assert scaled_mm(a, a).shape == (5, 5)
    w = torch.empty(3, 32, 64, device=META)
    assert mx_grouped_mm(torch.empty(5, 64, device=META), w, ends).shape == (5, 32)


@pytest.mark.parametrize("cached", [False, True])
def test_a_layer_from_there_is_filled_and_drawn_as_any_other(cached):
    """`to_empty` and `reset_parameters` leave no stale copy."""
    x, ends = torch.randn(6, 64), torch.tensor([2, 6], dtype=torch.int32)
    for make, arguments in (
        (lambda **options: MXLinear(64, 32, **options), (x,)),
        (lambda **options: MXExperts(2, 64, 32, **options), (x, ends)),
    ):
        layer = make(cached=cached, device=META).to_empty(device="cpu")
        torch.manual_seed(3)
        layer.reset_parameters()
        torch.manual_seed(3)
        assert torch.equal(layer(*arguments), make()(*arguments))
