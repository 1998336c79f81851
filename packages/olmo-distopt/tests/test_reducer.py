from typing import Any

import pytest
import torch
import torch.distributed as dist
from olmo_distopt import GradientReducer, ReplicaGroups
from torch import nn


def test_sums_of_bf16_gradients_are_in_fp32(alone, parameter):
    weight = parameter([1.0], torch.bfloat16)
    reducer = GradientReducer([("weight", weight)], alone)
    weight.sum().backward()
    for _ in range(512):
        (weight * 2.0**-9).sum().backward()
    reducer.reduce()
    assert weight.main_grad.dtype == torch.float32
    assert weight.main_grad.item() == 2.0
    assert weight.grad is None


@pytest.mark.parametrize("bucket_bytes", [1, 20, 44, 10**9])
def test_buckets_do_not_change_gradients(alone, bucket_bytes):
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 1), nn.Linear(1, 7))
    x = torch.randn(11, 3)
    reducer = GradientReducer(model.named_parameters(), alone, bucket_bytes=bucket_bytes)
    for piece in x.split([4, 1, 6]):
        model(piece).square().sum().backward()
    reducer.reduce()
    kept = {name: p.main_grad.clone() for name, p in model.named_parameters()}
    reducer.close()
    model(x).square().sum().backward()
    for name, p in model.named_parameters():
        ratio = (kept[name] * p.grad).sum() / p.grad.square().sum()
        assert ratio.item() == pytest.approx(1.0, abs=1e-6), name
        torch.testing.assert_close(kept[name], p.grad)


def test_a_bucket_shares_storage_and_a_window_starts_from_zero(alone, parameter):
    first, second = parameter([1.0, 2.0]), parameter([[3.0]])
    reducer = GradientReducer([("first", first), ("second", second)], alone)
    storages = {p.main_grad.untyped_storage().data_ptr() for p in (first, second)}
    assert len(storages) == 1
    for factor in (1.0, 10.0, 100.0):
        (first.sum() * factor).backward()
        reducer.reduce()
        assert first.main_grad.tolist() == [factor, factor]
        assert second.main_grad.tolist() == [[0.0]], "no gradient arrived: zeros"
        first.main_grad.fill_(float("nan"))
        second.main_grad.fill_(1e30)
        reducer.zero()


def test_a_gradient_of_an_early_microbatch_stays(alone, parameter):
    often, once = parameter([1.0]), parameter([1.0])
    reducer = GradientReducer([("once", once), ("often", often)], alone)
    (often + once).backward()
    often.backward()
    often.backward()
    reducer.reduce()
    assert (often.main_grad.item(), once.main_grad.item()) == (3.0, 1.0)


def test_windows_are_reduced_once(alone, parameter):
    weight = parameter([1.0])
    reducer = GradientReducer([("weight", weight)], alone)
    reducer.reduce()
    with pytest.raises(RuntimeError, match="once a window"):
        reducer.reduce()
    with pytest.raises(RuntimeError, match="arrived after `reduce\\(\\)`"):
        weight.sum().backward()
    weight.grad = None
    reducer.zero()
    weight.sum().backward()
    reducer.reduce()
    assert weight.main_grad.item() == 1.0


def test_a_gradient_made_by_hand_is_not_dropped(alone, parameter):
    weight = parameter([1.0])
    reducer = GradientReducer([("weight", weight)], alone)
    weight.grad = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"`\.grad` of `weight` must be empty"):
        reducer.reduce()


def test_a_main_grad_that_was_replaced_is_not_left_out(alone, parameter):
    weight = parameter([1.0])
    reducer = GradientReducer([("weight", weight)], alone)
    own = weight.main_grad
    weight.main_grad = torch.zeros(1)
    (3 * weight).sum().backward()
    with pytest.raises(RuntimeError, match=r"`main_grad` of `weight` must be the tensor that the"):
        reducer.reduce()
    weight.main_grad = own
    reducer.reduce(num_tokens=3)
    assert weight.main_grad.item() == 1.0


def test_a_model_turned_to_float64_later_is_refused(alone, parameter):
    weight = parameter([1.0])
    GradientReducer([("weight", weight)], alone)
    weight.data = weight.data.double()
    with pytest.raises(
        RuntimeError, match=r"wider a dtype than torch.float32, got \(1,\), torch.f"
    ):
        weight.sum().backward()


def test_tied_and_frozen_parameters(alone, parameter):
    tied, frozen = parameter([1.0]), parameter([1.0]).requires_grad_(False)
    with pytest.raises(ValueError, match="the same one as `embed` and `head`"):
        GradientReducer([("embed", tied), ("head", tied)], alone)
    with pytest.raises(ValueError, match="got `embed` twice"):
        GradientReducer([("embed", tied), ("embed", frozen)], alone)
    reducer = GradientReducer([("embed", tied), ("frozen", frozen)], alone)
    (tied * frozen + tied).backward()
    reducer.reduce()
    assert tied.main_grad.item() == 2.0
    assert not hasattr(frozen, "main_grad")


def test_close_gives_the_parameters_back(alone, parameter):
    weight = parameter([1.0])
    reducer = GradientReducer([("weight", weight)], alone)
    with pytest.raises(ValueError, match="`weight` must hold no gradient yet"):
        GradientReducer([("weight", weight)], alone)
    reducer.close()
    assert not hasattr(weight, "main_grad")
    with pytest.raises(RuntimeError, match="closed"):
        reducer.reduce()
    weight.sum().backward()
    assert weight.grad.item() == 1.0
    with pytest.raises(ValueError, match="`weight` must hold no gradient yet"):
        GradientReducer([("weight", weight)], alone)
    weight.grad = None
    GradientReducer([("weight", weight)], alone).close()


def test_bad_options(alone, parameter):
    weight = [("weight", parameter([1.0]))]
    with pytest.raises(ValueError, match="`bucket_bytes` must be > 0, got 0"):
        GradientReducer(weight, alone, bucket_bytes=0)
    with pytest.raises(ValueError, match=r"must be float32 or float64, got torch.bfloat16"):
        GradientReducer(weight, alone, accumulate_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"`collective` must be one of .*, got 'reduce'"):
        GradientReducer(weight, alone, collective="reduce")
    reducer = GradientReducer(weight, alone)
    with pytest.raises(ValueError, match=r"got one of shape \(3,\) that is not listed"):
        reducer.gradient_added(parameter([1.0, 2.0, 3.0]))
    reducer.close()
    with pytest.raises(ValueError, match="must not be narrower"):
        GradientReducer([("weight", parameter([1.0], torch.float64))], alone)
    transposed = nn.Parameter(torch.ones(2, 3).t())
    with pytest.raises(ValueError, match=r"`weight` must be contiguous, got shape \(3, 2\)"):
        GradientReducer([("weight", transposed)], alone)
    GradientReducer([], alone).reduce()


def test_no_sync_holds_and_refuses(alone, parameter):
    weight, other = parameter([1.0]), parameter([1.0])
    reducer = GradientReducer([("weight", weight), ("other", other)], alone, overlap=True)
    with reducer.no_sync():
        weight.sum().backward()
        with pytest.raises(RuntimeError, match=r"must be called outside of `no_sync\(\)`"):
            reducer.reduce()
        with reducer.no_sync():
            weight.sum().backward()
        weight.sum().backward()
    weight.sum().backward()
    with pytest.raises(RuntimeError, match="`weight` must get one gradient a window outside"):
        weight.sum().backward()
    weight.grad = None
    with (
        reducer.no_sync(),
        pytest.raises(RuntimeError, match="and no later one, but a second arrived"),
    ):
        weight.sum().backward()
    weight.grad = None
    with pytest.raises(RuntimeError, match="and no later one"):
        reducer.gradient_added(weight)
    other.sum().backward()
    reducer.reduce()
    assert (weight.main_grad.item(), other.main_grad.item()) == (4.0, 1.0)
    reducer.zero()
    weight.sum().backward()
    assert weight.main_grad.item() == 1.0


def test_gradients_may_be_counted_instead(alone, parameter):
    first, second = parameter([1.0]), parameter([1.0])
    reducer = GradientReducer([("first", first), ("second", second)], alone, overlap=True)
    reducer.zero(num_gradients=2)
    for weight in (first, second, second, first):
        weight.sum().backward()
    with pytest.raises(RuntimeError, match="`second` must get the 2 gradients that"):
        second.sum().backward()
    second.grad = None
    reducer.reduce()
    assert (first.main_grad.item(), second.main_grad.item()) == (2.0, 2.0)
    reducer.zero(num_gradients=3)
    first.sum().backward()  # fewer than announced: `reduce()` sums what there is
    reducer.reduce()
    assert (first.main_grad.item(), second.main_grad.item()) == (1.0, 0.0)
    reducer.zero()  # the next window counts nothing
    first.sum().backward()
    with pytest.raises(RuntimeError, match="`first` must get one gradient a window outside"):
        first.sum().backward()
    first.grad = None
    reducer.reduce()
    for wrong, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="`num_gradients`"):
            reducer.zero(num_gradients=wrong)


def test_a_window_that_has_begun_to_reduce_must_end(alone, parameter):
    weight = parameter([1.0])
    reducer = GradientReducer([("weight", weight)], alone, overlap=True)
    weight.sum().backward()
    with pytest.raises(RuntimeError, match=r"`zero\(\)` must wait for `reduce\(\)`"):
        reducer.zero()
    reducer.reduce()
    reducer.zero()
    reducer.zero()
    assert weight.main_grad.item() == 0.0


def test_without_overlap_passes_outside_of_no_sync_add_up(alone, parameter):
    weight = parameter([1.0])
    reducer = GradientReducer([("weight", weight)], alone)
    for _ in range(3):
        weight.sum().backward()
        reducer.gradient_added(weight)
    reducer.reduce()
    assert weight.main_grad.item() == 3.0
    with pytest.raises(RuntimeError, match=r"after `reduce\(\)`"):
        reducer.gradient_added(weight)


def test_tokens_of_one_process(alone, parameter):
    weight = parameter([1.0, 2.0])
    reducer = GradientReducer([("weight", weight)], alone)
    for num_tokens, expected in [(4, 2.0), (torch.tensor(2.0), 4.0), (0, 8.0)]:
        (weight.sum() * 8).backward()
        reducer.reduce(num_tokens=num_tokens)
        assert weight.main_grad.tolist() == [expected] * 2
        reducer.zero()
    GradientReducer([], alone).reduce(num_tokens=3)


def _sums(rank, world):
    groups = ReplicaGroups(
        {"all": dist.group.WORLD, "own": None}, lambda name, _: "own" if "own" in name else "all"
    )
    # Registered in another order than the one in which the gradients arrive, and one never does.
    late, early = nn.Parameter(torch.ones(3).bfloat16()), nn.Parameter(torch.ones(2).bfloat16())
    own, never = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(4))
    named: list[tuple[str, Any]] = [
        ("late", late),
        ("never", never),
        ("own", own),
        ("early", early),
    ]
    reducer = GradientReducer(named, groups, bucket_bytes=12)
    results = []
    for window in range(3):
        for _ in range(3):
            if rank == 0 or window == 2:
                (early.sum() * 2.0**-9).backward()
            (late.sum() + own.sum()).backward()
        if rank == 1:
            early.sum().backward()
        reducer.reduce()
        results.append([p.main_grad.tolist() for _, p in named])
        for _, p in named:
            p.main_grad.fill_(float("nan"))
        reducer.zero()
    return results


@pytest.mark.dist
def test_sums_over_replicas_are_in_fp32(processes):
    for results in processes.run(_sums, world=2):
        for window, (late, never, own, early) in enumerate(results):
            times = 6 if window == 2 else 3
            assert late == [6.0] * 3
            assert never == [0.0] * 4
            assert own == [3.0], "held by this process alone"
            assert early == [1 + times * 2.0**-9] * 2, "in BF16 this is 1"
