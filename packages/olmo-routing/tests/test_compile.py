"""Every function compiles into one graph that gives what eager gives, gradients included."""

import dataclasses
import inspect
from typing import Any

import olmo_routing
import pytest
import torch
from olmo_routing import (
    GerrymanderAlarm,
    LoadWindow,
    Router,
    SelectionBias,
    admit,
    balance_loss,
    keep_routes,
    margin_balance_loss,
    measure_balance,
    measure_load,
    plan_rows,
    plan_tiles,
    route,
    route_fractions,
    router_z_loss,
    stack_reports,
)

T, D, E, K = 13, 4, 6, 2
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(T, E, generator=GENERATOR)
SCORES = torch.softmax(LOGITS, 1)
IDS = LOGITS.topk(K, dim=1).indices.masked_fill(torch.arange(T)[:, None] == 5, -1)
KEPT = IDS.masked_fill(torch.arange(T)[:, None] % 4 == 1, -1)
MASK = torch.arange(T) < T - 2
BIAS = torch.linspace(-0.1, 0.1, E)
COUNTS = torch.arange(3 * 2 * 4).view(3, 2, 4)
ALARM = GerrymanderAlarm(E, num_layers=2, window=20)
ROUTER = Router(D, E, K, selection_bias=SelectionBias(E, 0.1))
JITTERED = Router(D, E, K, jitter=0.1)

CASES = {
    "route": (lambda z: route(z, K, bias_E=BIAS, mask_T=MASK), LOGITS),
    "route sigmoid": (
        lambda z: route(z, K, gate="sigmoid", num_groups=3, topk_groups=2, route_scale=2.0),
        LOGITS,
    ),
    "balance_loss": (lambda s: balance_loss(s, IDS, mask_T=MASK), SCORES),
    "balance_loss by sequence": (lambda s: balance_loss(s, IDS, num_sequences=T), SCORES),
    "balance_loss online": (
        lambda s: balance_loss(s, IDS, mask_T=MASK, fractions_BE=LoadWindow(E).add(IDS)),
        SCORES,
    ),
    "balance_loss margin": (
        lambda s: margin_balance_loss(s, IDS, mask_T=MASK, bias_E=BIAS, num_sequences=T),
        SCORES,
    ),
    "fractions": (lambda ids: route_fractions(ids, E, mask_T=MASK), IDS),
    "router_z_loss": (lambda z: router_z_loss(z, mask_T=MASK), LOGITS),
    "plan_rows": (lambda ids: plan_rows(ids, E, align=4), IDS),
    "measure_balance": (lambda s: measure_balance(s, IDS, mask_T=MASK), SCORES),
    "measure_balance with drops": (
        lambda s: stack_reports(
            [measure_balance(s, IDS, kept_ids_TK=KEPT, weights_TK=SCORES[:, :K], num_ranks=3)]
        ),
        SCORES,
    ),
    "alarm": (lambda s: ALARM.update([measure_balance(s, ids) for ids in (IDS, KEPT)]), SCORES),
    "measure_load": (lambda mass: measure_load(COUNTS[0, 0], mass), torch.ones(4)),
    "admit fair": (lambda counts: admit(counts, 31), COUNTS),
    "admit tail": (lambda counts: admit(counts, 31, policy="tail"), COUNTS),
    "Router": (lambda x: ROUTER(x, mask_T=MASK), LOGITS[:, :D]),
    "Router forced at random": (lambda x: ROUTER(x, force="random"), LOGITS[:, :D]),
    "Router with jitter": (lambda x: JITTERED(x, mask_T=MASK), LOGITS[:, :D]),
    "keep_routes": (lambda ids: keep_routes(ids, COUNTS.flatten()[:E]), IDS),
    "plan_tiles": (
        lambda ids: plan_tiles((p := plan_rows(ids, E)).offsets_E, p.routes_R.shape[0], 4),
        IDS,
    ),
    "Router with ids": (lambda x: ROUTER(x, expert_ids_TK=IDS), LOGITS[:, :D]),
}


def outputs_and_gradient(function, x):
    """Return every tensor of the result by name, and the gradient of a mix of all of them."""
    if x.is_floating_point():
        x = x.clone().requires_grad_()
    result: Any = function(x)
    if isinstance(result, torch.Tensor):
        result = {"result": result}
    elif dataclasses.is_dataclass(result):
        result = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    with_gradient = [value for value in result.values() if value.requires_grad]
    if with_gradient:
        mix = torch.stack([(value * torch.rand_like(value)).sum() for value in with_gradient])
        (result["gradient"],) = torch.autograd.grad(mix.sum(), x)
    return result


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_compiled_equals_eager(case, dynamic):
    function, x = CASES[case]
    torch.manual_seed(1)
    expected = outputs_and_gradient(function, x)
    torch.manual_seed(1)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    got = outputs_and_gradient(compiled, x)
    assert ("gradient" in expected) == case.startswith(("route", "Router", "balance"))
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-6, msg=name)


def moved_bias(counts, rate):
    bias = SelectionBias(E, rate)
    bias.update(counts)
    return bias.bias_E


def watched(scores, honesty, imbalance):
    options = {"least_honesty": honesty, "least_imbalance": 1 + imbalance}
    alarm = GerrymanderAlarm(E, window=20, **options)
    return alarm.update([measure_balance(scores, IDS)]), alarm.history_4WL[:, -1]


# Every public name with options that are floats, as a function of a tensor and of these floats.
OF_FLOATS = {
    "route": (lambda z, scale: route(z, K, route_scale=scale).weights_TK, LOGITS, {"route_scale"}),
    "margin_balance_loss": (
        lambda s, temperature: margin_balance_loss(s, IDS, temperature=temperature),
        SCORES,
        {"temperature"},
    ),
    "SelectionBias": (moved_bias, IDS.new_tensor([5, 0, 2, 1, 1, 9]), {"rate"}),
    "GerrymanderAlarm": (watched, SCORES, {"least_honesty", "least_imbalance"}),
}
# Its constructor makes a parameter, which no graph can: the forward is compiled above.
NOT_IN_A_GRAPH = {"Router"}


def test_no_float_option_is_forgotten():
    found = {}
    for name in olmo_routing.__all__:
        of = getattr(olmo_routing, name)
        if dataclasses.is_dataclass(of):
            continue
        options = {
            p.name for p in inspect.signature(of).parameters.values() if p.annotation is float
        }
        if options and name not in NOT_IN_A_GRAPH:
            found[name] = options
    assert found == {name: options for name, (_, _, options) in OF_FLOATS.items()}


@pytest.mark.parametrize("name", OF_FLOATS)
def test_float_options_may_be_symbols_of_a_graph(name):
    function, x, options = OF_FLOATS[name]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    results = []
    for value in (0.2, 0.7):
        floats = [value] * len(options)
        results.append(compiled(x, *floats))
        torch.testing.assert_close(results[-1], function(x, *floats), rtol=1e-5, atol=1e-7)
    if name != "GerrymanderAlarm":
        assert not torch.equal(*results)
    for wrong in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match=r"`\w+` must be"):
            function(x, *[wrong] * len(options))


def test_ids_are_still_checked_outside_of_the_graph():
    for call in (
        lambda ids: plan_rows(ids, E),
        lambda ids: balance_loss(SCORES, ids),
        lambda ids: measure_balance(SCORES, ids),
    ):
        for wrong in (E, -2):
            with pytest.raises(ValueError, match=r"must be in \[-1, 6\)"):
                call(torch.full((T, K), wrong))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in jvp
def test_forward_mode_in_a_graph_is_no_silent_zero():
    x, v = torch.randn(2, T, D, generator=GENERATOR)
    expected = v @ ROUTER.weight_ED.detach().T

    def along(x, v):
        return torch.func.jvp(lambda x: ROUTER(x).logits_TE, (x,), (v,))[1]

    torch.testing.assert_close(along(x, v), expected)
    compiled = torch.compile(along, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, v), expected)
