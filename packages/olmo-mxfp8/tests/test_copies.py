"""Copies and pickles: of values, of caches and of layers, with and without quantised weights."""

import copy
import io
import pickle

import pytest
import torch
from olmo_mxfp8 import MXExperts, MXLinear, MXRecipe, MXTensor, WeightCache, dequantize, quantize


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [copy.copy, copy.deepcopy, pickled, saved]
COARSE = MXRecipe(granularity=128, element="e5m2")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dim", [0, 1])
def test_values(way, dim):
    t = quantize(torch.randn(128, 256), dim=dim, element="e5m2", granularity="128x128")
    back = way(t)
    assert isinstance(back, MXTensor)
    assert (back.dim, back.element, back.granularity) == (dim, "e5m2", "128x128")
    assert torch.equal(dequantize(back), dequantize(t))


@pytest.mark.parametrize("way", WAYS)
def test_caches_follow_their_weight(way):
    cache = WeightCache(torch.nn.Parameter(torch.randn(128, 256)), recipe=COARSE)
    back = way(cache)
    assert back.recipe == COARSE
    assert (back.weight is cache.weight) == (way is copy.copy)
    assert torch.equal(dequantize(back.forward), dequantize(cache.forward))
    with torch.no_grad():
        back.weight.mul_(-3)
    back.refresh()
    assert torch.equal(
        dequantize(back.input_grad),
        dequantize(quantize(back.weight.mT, element="e5m2", granularity="128x128")),
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cached", [False, True])
def test_layers(way, cached):
    x, ends = torch.randn(6, 128), torch.tensor([2, 6], dtype=torch.int32)
    linear = MXLinear(128, 256, bias=True, recipe=COARSE, cached=cached)
    assert torch.equal(way(linear)(x), linear(x))
    experts = MXExperts(2, 128, 256, recipe=COARSE, cached=cached)
    back = way(experts)
    assert torch.equal(back(x, ends), experts(x, ends))
    back(x, ends).sum().backward()
    torch.optim.SGD(back.parameters(), lr=0.5).step()
    back.refresh()
    assert torch.equal(back(x, ends), MXExperts.forward(way(back), x, ends))
    if way is not copy.copy:
        assert not torch.equal(back(x, ends), experts(x, ends))
