"""Bad input is refused before anything is sent or changed, in words that say what to do."""

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from olmo_distopt import (
    GradientReducer,
    ReplicaGroups,
    ShardedAdamW,
    ShardedMuon,
    StepGuard,
    clip_factor,
    clip_grad_norm,
    global_grad_norm,
    memory_report,
)
from torch import nn

OPTIMIZERS: list[Any] = [ShardedAdamW, ShardedMuon]


def _reducer(named, groups, **options):
    return GradientReducer(named, groups, **options)


def _adamw(named, groups, **options):
    return ShardedAdamW(named, groups, **{"lr": 0.1, **options})


def _muon(named, groups, **options):
    return ShardedMuon(named, groups, **{"lr": 0.1, **options})


MAKERS = [_reducer, _adamw, _muon]


def _used_up():
    named = nn.Linear(2, 2).named_parameters()
    list(named)
    return named


def _tied_by_data():
    tied = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    tied["b"].weight.data = tied["a"].weight.data
    return tied.named_parameters()


def _overlapping():
    line = torch.zeros(6)
    return [("a", nn.Parameter(line[:4])), ("b", nn.Parameter(line[3:]))]


def _weight(value):
    return [("w", nn.Parameter(value))]


LISTS = {
    "no names": (lambda: nn.Linear(2, 2).parameters(), TypeError, "got a Parameter"),
    "a module": (lambda: nn.Linear(2, 2), TypeError, "got a Linear"),
    "a mapping": (
        lambda: dict(nn.Linear(2, 2).named_parameters()),
        TypeError,
        r"give its `.items\(\)`",
    ),
    "a tensor": (lambda: [("w", torch.ones(2))], TypeError, r"got \(a str, a Tensor\)"),
    "no text": (lambda: [(0, nn.Parameter(torch.ones(2)))], TypeError, r"\(a int, a Parameter\)"),
    "used up": (_used_up, ValueError, "a generator that has been used up"),
    "tied by data": (_tied_by_data, ValueError, "`a.weight` and `b.weight` overlap"),
    "overlapping": (_overlapping, ValueError, "`a` and `b` overlap; tie weights by making them"),
    "complex": (
        lambda: _weight(torch.ones(2, 2, dtype=torch.complex64)),
        ValueError,
        "real floating dtype, got torch.complex64",
    ),
    "double": (
        lambda: _weight(torch.ones(2, 2, dtype=torch.float64)),
        ValueError,
        "`w` .*float64|float64 .*`w`|`accumulate_dtype` must not be narrower",
    ),
    "strided": (lambda: _weight(torch.ones(2, 3).T), ValueError, "`w` must be contiguous"),
    "twice": (
        lambda: [*_weight(torch.ones(2, 2)), *_weight(torch.ones(2, 2))],
        ValueError,
        "got `w` twice",
    ),
}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("case", LISTS)
def test_lists_that_are_no_parameters(alone, make, case):
    named, error, message = LISTS[case]
    with pytest.raises(error, match=message):
        make(named(), alone)


def test_a_model_on_meta_has_a_state_dict_and_takes_no_step(alone):
    """One process asks what a checkpoint of such a model would hold, and allocates nothing."""
    named = [*_weight(torch.ones(2, 2, device="meta")), ("b", nn.Parameter(torch.ones(2)))]
    with pytest.raises(ValueError, match="`w` must hold values, but it is on the meta device; ma"):
        GradientReducer(named, alone)
    for make in OPTIMIZERS:
        optimizer = make(named, alone, lr=0.1)
        assert len(optimizer.state_dict()) == (7 if make is ShardedAdamW else 6)
        for _, parameter in named:
            parameter.main_grad = torch.zeros_like(parameter)
        with pytest.raises(ValueError, match="`w` must hold values, but it is on the meta device"):
            optimizer.step()
        assert torch.equal(named[1][1], torch.ones(2))


def test_views_of_one_line_that_do_not_overlap_are_parameters(alone):
    line = torch.zeros(6)
    named = [("a", nn.Parameter(line[:3])), ("b", nn.Parameter(line[3:]))]
    named.append(("empty", nn.Parameter(line[3:3])))
    for make in MAKERS:
        make(named, alone)


def test_a_tensor_of_another_kind_is_no_parameter(alone):
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (2, 2), dtype=torch.float32)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return Wrapper()  # as `detach` does

    named: list[Any] = [("w", nn.Parameter(Wrapper()))]
    for make in MAKERS:
        with pytest.raises(ValueError, match="`w` must be a plain tensor, got a Wrapper"):
            make(named, alone)


@pytest.mark.parametrize("make", MAKERS)
def test_replica_groups_of_another_kind(make):
    with pytest.raises(TypeError, match="must be a `ReplicaGroups`, got a dict; in one process"):
        make(_weight(torch.ones(2, 2)), {"all": None})


@pytest.mark.parametrize(
    ("groups", "assign", "message"),
    [
        ({"a": 3}, lambda *_: "a", "`a` must be a process group, or None, got 3"),
        ({"a": [0, 1]}, lambda *_: "a", r"got \[0, 1\]; make one with `torch.distributed.new_gr"),
        ([None], lambda *_: "a", "must be a mapping from names"),
        ({"a": None}, "a", "`assign` must be a function .*, got 'a'"),
    ],
)
def test_groups_of_another_kind(groups, assign, message):
    with pytest.raises(TypeError, match=message):
        ReplicaGroups(groups, assign)


NUMBERS = [
    ({"lr": torch.tensor(0.1)}, "`lr` must be a number, got a Tensor; give `float"),
    ({"lr": "0.1"}, "`lr` must be a number, got a str"),
    ({"lr": None}, "`lr` must be a number, got None"),
    ({"weight_decay": None}, "`weight_decay` must be a number"),
    ({"eps": None}, "`eps` must be a number"),
    ({"betas": 0.9}, "`betas` must be two numbers"),
    ({"betas": (0.9, 0.9, 0.9)}, "`betas` must be two numbers"),
    ({"betas": (torch.tensor(0.9), 0.9)}, r"`betas\[0\]` must be a number, got a Tensor"),
    ({"bucket_bytes": "1"}, "`bucket_bytes` must be a number"),
    ({"min_shard_numel": 1.5}, "`min_shard_numel` must be a whole number"),
    ({"decay": 0.1}, r"`decay` must be a function.*`lambda name, parameter: 0.1`"),
    ({"lr_scale": 0.5}, "`lr_scale` must be a function"),
    ({"decay": lambda *_: None}, r"`decay\('w'\)` must be a number, got None"),
    ({"after_rebuild": 3}, "`after_rebuild` must be a function"),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize(("options", "message"), NUMBERS)
def test_arguments_of_another_kind(alone, make, options, message):
    with pytest.raises(TypeError, match=message):
        make(_weight(torch.ones(2, 2)), alone, **{"lr": 0.1, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_iterations": 2.5}, "`num_iterations` must be a whole number, got a float"),
        ({"matrices": "w"}, "`matrices` must be a function"),
    ],
)
def test_arguments_of_muon(alone, options, message):
    with pytest.raises(TypeError, match=message):
        ShardedMuon(_weight(torch.ones(2, 2)), alone, lr=0.1, **options)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_arguments_of_a_step_change_nothing(alone, make):
    named = _weight(torch.ones(2, 2))
    vars(named[0][1])["main_grad"] = torch.ones(2, 2)
    optimizer = make(named, alone, lr=0.1)
    for options, error, message in [
        ({"lr": torch.tensor(0.1)}, TypeError, "`lr` must be a number, got a Tensor"),
        ({"lr": math.inf}, ValueError, "`lr` must be in"),
        ({"grad_scale": 0.5}, TypeError, "`grad_scale` must be a 0-d tensor, got a float; give"),
        ({"skip": True}, TypeError, "`skip` must be a 0-d tensor, got a bool; give"),
    ]:
        with pytest.raises(error, match=message):
            optimizer.step(**options)
    optimizer.lr = torch.tensor(0.1)
    with pytest.raises(TypeError, match="`lr` must be a number, got a Tensor"):
        optimizer.step()
    assert optimizer.num_steps == 0
    assert torch.equal(named[0][1], torch.ones(2, 2))


def test_numbers_where_tensors_are_needed():
    one = torch.tensor(1.0)
    for call in (
        lambda: clip_factor(1.0, 1.0),  # pyright: ignore[reportArgumentType] # what is tested
        lambda: StepGuard().check(1.0, one),  # pyright: ignore[reportArgumentType] # likewise
        lambda: StepGuard().check(one, 1.0),  # pyright: ignore[reportArgumentType] # likewise
    ):
        with pytest.raises(TypeError, match="must be a 0-d tensor, got a float; give"):
            call()
    with pytest.raises(TypeError, match="`max_norm` must be a number, got None"):
        clip_factor(one, None)  # pyright: ignore[reportArgumentType] # what is tested


@pytest.fixture
def trained(alone):
    """A weight of ones, its reducer, its optimizer, and a gradient of ones that is not reduced."""
    named = _weight(torch.ones(2, 2))
    reducer, optimizer = GradientReducer(named, alone), ShardedAdamW(named, alone, lr=0.1)
    named[0][1].sum().backward()
    return named, reducer, optimizer


def test_gradients_that_are_not_reduced_are_not_used(alone, trained):
    """Before `reduce()` they are this process's own: replicas would drift apart in silence."""
    named, reducer, optimizer = trained
    for window in range(2):
        for use in (
            optimizer.step,
            lambda: global_grad_norm(named, alone),
            lambda: clip_grad_norm(named, alone, 1.0),
        ):
            with pytest.raises(RuntimeError, match=r"must be summed before .* call `reduce\(\)`"):
                use()
        assert optimizer.num_steps == window
        reducer.reduce()
        assert global_grad_norm(named, alone).item() == (2.0 if window == 0 else 0.0)
        optimizer.step()
        reducer.zero()
    reducer.close()
    named[0][1].main_grad = torch.ones(2, 2)  # made by hand: there is no window
    optimizer.step()


@pytest.mark.parametrize(
    ("count", "error", "message"),
    [
        (-3, ValueError, r"`num_tokens` must be in \[0, inf\), got -3"),
        (math.nan, ValueError, r"must be in \[0, inf\), got nan"),
        (math.inf, ValueError, "got inf"),
        ("4", TypeError, "`num_tokens` must be a number, got a str"),
        (torch.tensor([2]), ValueError, r"`num_tokens` must be 0-d, got shape \(1,\)"),
    ],
)
def test_counts_of_tokens_that_are_none(trained, count, error, message):
    named, reducer, _ = trained
    with pytest.raises(error, match=message):
        reducer.reduce(num_tokens=count)
    reducer.reduce(num_tokens=2)  # nothing has begun
    assert named[0][1].main_grad.tolist() == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("count", [-1.0, math.nan])
def test_a_count_on_the_device_that_is_none_is_seen_in_the_norm(alone, trained, count):
    named, reducer, _ = trained
    reducer.reduce(num_tokens=torch.tensor(count))
    assert global_grad_norm(named, alone).isnan()


def test_a_closed_reducer_says_so(trained):
    _, reducer, _ = trained
    reducer.close()
    for method in ("zero", "reduce"):
        with pytest.raises(RuntimeError, match=rf"`{method}\(\)` was called on a closed"):
            getattr(reducer, method)()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_neither_optimizer_nor_reducer_is_copied(trained, duplicate):
    """A copy would update parameters that no model reads, or hooks would add twice."""
    for made in trained[1:]:
        with pytest.raises(TypeError, match="belongs to the parameters of one model and cannot"):
            duplicate(made)


def test_a_model_may_be_copied_and_pickled(alone, trained):
    named, *_ = trained
    model = nn.ParameterDict(dict(named))
    twin = copy.deepcopy(model)
    GradientReducer(twin.named_parameters(), alone)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with pytest.raises(ValueError, match=r"of a model that was pickled, `del` its `.main_grad`"):
        GradientReducer(loaded.named_parameters(), alone)
    del loaded["w"].main_grad
    GradientReducer(loaded.named_parameters(), alone)


def test_a_backward_that_keeps_its_graph(alone):
    weight = nn.Parameter(torch.ones(2, 2))
    reducer = GradientReducer([*_weight(torch.ones(1)), ("x", weight)], alone)
    with pytest.warns(UserWarning, match="create_graph"):
        weight.square().sum().backward(create_graph=True)
    reducer.reduce()
    assert weight.main_grad.tolist() == [[2.0, 2.0]] * 2
    assert not weight.main_grad.requires_grad


def test_a_model_that_has_changed_its_shape_or_place(alone):
    weight = nn.Parameter(torch.ones(2, 3))
    named = [("w", weight)]
    reducer = GradientReducer(named, alone)
    optimizer = ShardedAdamW(named, alone, lr=0.1)
    reducer.reduce()
    optimizer.step()
    before = weight.detach().clone()
    weight.data = torch.ones(3, 2).T
    with pytest.raises(ValueError, match=r"`w` must stay contiguous and on cpu.*strides \(1, 2\)"):
        optimizer.step()
    weight.data = before
    weight.main_grad = torch.ones(3, 2).T
    with pytest.raises(ValueError, match=r"`main_grad` of `w` must be contiguous and on cpu"):
        optimizer.step()
    weight.main_grad = torch.ones(2, 3, device="meta")
    with pytest.raises(ValueError, match=r"`main_grad` of `w` must be contiguous and on cpu"):
        optimizer.step()
    assert optimizer.num_steps == 1
    reducer.zero()
    weight.main_grad = torch.zeros(2, 3)
    weight.data = torch.ones(6)
    with pytest.raises(RuntimeError, match=r"gradient of `w` must have the shape \(2, 3\)"):
        weight.sum().backward()


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_units_that_no_forward_waits_for(alone, make):
    layers = nn.ModuleList([nn.Linear(2, 2)])
    optimizer = make(layers.named_parameters(), alone, lr=0.1)
    with pytest.raises(ValueError, match="a ModuleList has no forward; list what it holds"):
        optimizer.overlap_gather([layers])
    with pytest.raises(TypeError, match="`units` must list modules, got a Linear by itself"):
        optimizer.overlap_gather(layers[0])
    with pytest.raises(TypeError, match="`units` must list modules, got a str"):
        optimizer.overlap_gather(nn.ModuleDict({"a": layers}))
    assert not layers[0]._forward_pre_hooks
    optimizer.overlap_gather(layers)
    assert len(layers[0]._forward_pre_hooks) == 1


def test_a_report_of_parameters_that_the_optimizer_lacks(alone):
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer = ShardedAdamW(model.named_parameters(), alone, lr=0.1)
    model.bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"must be those of the optimizer, which has no \['bias'"):
        memory_report(model.named_parameters(), alone, optimizer)
    namesake = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match=r"must be those of the optimizer, which has no \['weight"):
        memory_report(namesake.named_parameters(), alone, optimizer)
