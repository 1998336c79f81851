"""`WeightCache`: both orientations, and never those of another step."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
from olmo_mxfp8 import (
    MXLinear,
    MXRecipe,
    WeightCache,
    mx_grouped_mm,
    mx_linear,
    quantize,
    quantize_with_transpose,
)
from torch import nn

DTYPES = [torch.float32, torch.bfloat16]


def _same(a, b):
    codes = torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
    return codes and torch.equal(a.scales, b.scales)


def _run(function, x, w, *arguments, **options):
    x = x.detach().requires_grad_()
    y = function(x, w, *arguments, **options)
    return y.detach(), *torch.autograd.grad(y, (x, w), torch.ones_like(y))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", [32, 128])
@pytest.mark.parametrize("shape", [(128, 256), (3, 128, 256)])
def test_holds_both_orientations(shape, granularity, dtype):
    w = torch.randn(shape, dtype=dtype)
    recipe = MXRecipe(element="e5m2", scale_rule="floor", granularity=granularity)
    cache = WeightCache(w, recipe=recipe)
    case = {
        "element": "e5m2",
        "scale_rule": "floor",
        "granularity": "128x128" if granularity == 128 else 32,
    }
    assert _same(cache.forward, quantize(w, **case))
    assert _same(cache.input_grad, quantize(w.mT, **case))
    assert cache.input_grad.shape == w.mT.shape


@pytest.mark.parametrize("input_grad", ["mxfp8", "high"])
def test_products_with_a_cache_are_those_without(input_grad):
    recipe = MXRecipe(input_grad=input_grad)
    x, w = torch.randn(9, 64), torch.randn(3, 96, 64, requires_grad=True)
    offsets = torch.tensor([4, 4, 9], dtype=torch.int32)
    cache = WeightCache(w, recipe=recipe)
    got = _run(mx_grouped_mm, x, w, offsets, recipe=recipe, cache=cache)
    want = _run(mx_grouped_mm, x, w, offsets, recipe=recipe)
    assert all(map(torch.equal, got, want))
    w = w[0].detach().requires_grad_()
    got = _run(mx_linear, x, w, recipe=recipe, cache=WeightCache(w, recipe=recipe))
    assert all(map(torch.equal, got, _run(mx_linear, x, w, recipe=recipe)))


def _step(w):
    w.grad = torch.ones_like(w)
    torch.optim.AdamW([w], lr=0.1).step()


def _load(w):
    holder = nn.Linear(64, 32, bias=False)
    holder.weight = w
    holder.load_state_dict({"weight": torch.randn(32, 64)})


def _edit(w):
    with torch.no_grad():
        w[3] *= 2


@pytest.mark.parametrize("change", [_step, _load, _edit])
def test_a_stale_cache_is_an_error_until_it_is_refreshed(change):
    w = nn.Parameter(torch.randn(32, 64))
    x = torch.randn(5, 64)
    cache = WeightCache(w)
    before = mx_linear(x, w, cache=cache)
    change(w)
    for read in (lambda: cache.forward, lambda: cache.input_grad):
        with pytest.raises(RuntimeError, match=r"stale: its weight is at version .* `refresh\(\)`"):
            read()
    with pytest.raises(RuntimeError, match="is stale"):
        mx_linear(x, w, cache=cache)
    cache.refresh()
    y = mx_linear(x, w, cache=cache)
    assert torch.equal(y, mx_linear(x, w))
    assert not torch.equal(y, before)


def test_a_weight_that_moved_is_an_error():
    w = nn.Parameter(torch.randn(32, 64))
    cache = WeightCache(w)
    w.data = w.data.clone()
    with pytest.raises(RuntimeError, match="has moved in memory"):
        _ = cache.forward
    cache.refresh()
    assert _same(cache.forward, quantize(w))


def _among_two_ranks(collective, mine, theirs):
    """Run `collective(group, tensor)` on two ranks, each a thread of this process."""
    store, timeout = torch.distributed.HashStore(), timedelta(seconds=30)

    def run(rank, tensor):
        collective(torch.distributed.ProcessGroupGloo(store, rank, 2, timeout), tensor).wait()

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(run, (0, 1), (theirs, mine)))


def _by_data(w):
    return lambda: w.data.mul_(2)


def _by_a_flat_buffer(w):
    flat = torch.randn(2 * w.numel())
    w.data = flat[: w.numel()].view_as(w)  # as optimizers with a flat buffer do
    return lambda: flat.mul_(2)


def _by_broadcast(w):
    broadcast = lambda group, tensor: group.broadcast(tensor, 0)  # noqa: E731
    return lambda: _among_two_ranks(broadcast, w.detach(), 2 * w.detach())


def _by_all_reduce(w):
    all_reduce = lambda group, tensor: group.allreduce([tensor])  # noqa: E731
    return lambda: _among_two_ranks(all_reduce, w.detach(), w.detach().clone())


def _by_numpy(w):
    return lambda: np.multiply(w.detach().numpy(), 2, out=w.detach().numpy())


def _by_dlpack(w):
    return lambda: torch.from_dlpack(w.detach()).mul_(2)


def _by_pointer(w):
    twice = 2 * w.detach()
    return lambda: ctypes.memmove(w.data_ptr(), twice.data_ptr(), twice.nbytes)


UNSEEN = [
    *(_by_data, _by_a_flat_buffer, _by_numpy, _by_dlpack, _by_pointer),
    *(_by_broadcast, _by_all_reduce),
]


@pytest.mark.parametrize("prepare", UNSEEN)
def test_a_write_that_is_not_counted_is_not_seen(prepare):
    """The limit that the class documents: none of them raises the version of the weight."""
    w = nn.Parameter(torch.randn(32, 64))
    write = prepare(w)
    cache = WeightCache(w)
    before, x = quantize(w), torch.randn(5, 64)
    write()
    assert _same(cache.forward, before)
    assert torch.equal(cache.forward.scales + 1, quantize(w).scales)
    cache.refresh()
    assert _same(cache.forward, quantize(w))
    assert torch.equal(mx_linear(x, w, cache=cache), mx_linear(x, w))


def test_it_is_read_and_not_made_again_over_microbatches(monkeypatch):
    w = nn.Parameter(torch.randn(32, 64))
    cache = WeightCache(w)
    made = []
    original = quantize

    def counted(x, **options):
        made.append(x.shape)
        return original(x, **options)

    def counted_both(x, **options):
        made.append("both")
        return quantize_with_transpose(x, **options)

    monkeypatch.setattr("olmo_mxfp8._weight_cache.quantize", counted)
    monkeypatch.setattr("olmo_mxfp8._weight_cache.quantize_with_transpose", counted_both)
    for _ in range(3):
        mx_linear(torch.randn(5, 64), w, cache=cache).sum().backward()
    assert made == []
    mx_linear(torch.randn(5, 64), w).sum()
    assert made == [(1, 32, 64)]
    cache.refresh()
    assert made == [(1, 32, 64), "both"]


def test_a_change_between_forward_and_backward_is_an_error():
    w = nn.Parameter(torch.randn(32, 64))
    cache = WeightCache(w)
    y = mx_linear(torch.randn(5, 64, requires_grad=True), w, cache=cache)
    _edit(w)
    cache.refresh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_weight_that_does_not_count_its_changes_is_refused():
    with torch.inference_mode():
        w = torch.randn(32, 64)
        with pytest.raises(ValueError, match="`weight` must count its changes"):
            MXLinear(64, 32, cached=True)
        assert MXLinear(64, 32)(w).shape == (32, 32)
    with pytest.raises(ValueError, match="`weight` must count its changes"):
        WeightCache(w)


def test_a_cache_renewed_in_inference_mode_trains():
    layer = MXLinear(64, 32, cached=True)
    x = torch.randn(5, 64, requires_grad=True)
    want = _run(mx_linear, x, layer.weight)
    with torch.inference_mode():
        layer.refresh()
        assert torch.equal(layer(x), want[0])
    got = _run(lambda x, _: layer(x), x, layer.weight)
    assert all(map(torch.equal, got, want))


def test_bad_arguments_are_refused():
    w = torch.randn(32, 64)
    x = torch.randn(2, 64)
    with pytest.raises(ValueError, match=r"D, `weight.shape\[-1\]`, must be .* got 44"):
        WeightCache(torch.zeros(32, 44))
    with pytest.raises(ValueError, match=r"F, `weight.shape\[-2\]`, must be .* got 44"):
        WeightCache(torch.zeros(44, 32))
    with pytest.raises(TypeError, match="`weight` must be float32, bfloat16 or float16"):
        WeightCache(w.double())
    with pytest.raises(ValueError, match=r"`weight` must be \(.., F, D\), got \(64,\)"):
        WeightCache(w[0])
    with pytest.raises(ValueError, match=r"`cache` must be that of `w`.*`refresh\(\)`"):
        mx_linear(x, w, cache=WeightCache(w.clone()))
    with pytest.raises(ValueError, match="`cache` must have the `recipe`"):
        mx_linear(x, w, cache=WeightCache(w, recipe=MXRecipe(element="e5m2")))
