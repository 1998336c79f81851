"""Arguments of the wrong kind: a clear error where they enter, not one of torch's further down."""

import pytest
import torch
from olmo_routing import (
    GerrymanderAlarm,
    LoadWindow,
    Router,
    SelectionBias,
    balance_loss,
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

T, E, K = 6, 8, 2
LOGITS = torch.randn(T, E, generator=torch.Generator().manual_seed(0))
ROUTING = route(LOGITS, K)
SCORES, IDS = ROUTING.scores_TE, ROUTING.expert_ids_TK
REPORT = measure_balance(SCORES, IDS)
ROUTER = Router(E, E, K)

OF_A_MASK = {
    "route": lambda mask: route(LOGITS, K, mask_T=mask),
    "Router": lambda mask: ROUTER(LOGITS, mask_T=mask),
    "balance_loss": lambda mask: balance_loss(SCORES, IDS, mask_T=mask),
    "margin_balance_loss": lambda mask: margin_balance_loss(SCORES, IDS, mask_T=mask),
    "router_z_loss": lambda mask: router_z_loss(LOGITS, mask_T=mask),
    "measure_balance": lambda mask: measure_balance(SCORES, IDS, mask_T=mask),
    "route_fractions": lambda mask: route_fractions(IDS, E, mask_T=mask),
    "LoadWindow": lambda mask: LoadWindow(E).add(IDS, mask_T=mask),
}
OF_IDS = {
    "plan_rows": lambda ids: plan_rows(ids, E),
    "Router": lambda ids: ROUTER(LOGITS, expert_ids_TK=ids),
    "balance_loss": lambda ids: balance_loss(SCORES, ids),
    "margin_balance_loss": lambda ids: margin_balance_loss(SCORES, ids),
    "measure_balance": lambda ids: measure_balance(SCORES, ids),
    "route_fractions": lambda ids: route_fractions(ids, E),
    "LoadWindow": lambda ids: LoadWindow(E).add(ids),
}
OF_A_MATRIX = {
    "route": lambda z: route(z, K),
    "Router": ROUTER,
    "balance_loss": lambda s: balance_loss(s, IDS),
    "margin_balance_loss": lambda s: margin_balance_loss(s, IDS),
    "router_z_loss": router_z_loss,
    "measure_balance": lambda s: measure_balance(s, IDS),
}
OF_A_NUMBER = {
    "route_scale": lambda number: route(LOGITS, K, route_scale=number),
    "jitter": lambda number: Router(4, E, K, jitter=number),
    "rate": lambda number: SelectionBias(E, number),
    "temperature": lambda number: margin_balance_loss(SCORES, IDS, temperature=number),
    "least_honesty": lambda number: GerrymanderAlarm(E, least_honesty=number),
    "least_imbalance": lambda number: GerrymanderAlarm(E, least_imbalance=number),
}


@pytest.mark.parametrize("name", OF_A_MASK)
def test_a_mask_is_a_tensor_of_bools(name):
    with pytest.raises(TypeError, match="`mask_T` must be a tensor, got list"):
        OF_A_MASK[name]([True] * T)
    with pytest.raises(TypeError, match=r"`mask_T` must be bool .*; call `.bool\(\)`"):
        OF_A_MASK[name](torch.ones(T).int())


@pytest.mark.parametrize("name", OF_IDS)
def test_ids_are_an_int64_tensor(name):
    with pytest.raises(TypeError, match="must be a tensor, got Routing; give a routing's `expert_"):
        OF_IDS[name](ROUTING)
    with pytest.raises(TypeError, match=r"must be int64, got torch.int32; call `.long\(\)`"):
        OF_IDS[name](IDS.int())
    with pytest.raises(TypeError, match=r"got torch\.bool; give the ids themselves, -1 for "):
        OF_IDS[name](IDS > 0)


@pytest.mark.parametrize("name", sorted(OF_IDS.keys() & OF_A_MATRIX.keys()))
def test_ids_are_on_the_device_of_their_tokens(name):
    with pytest.raises(ValueError, match=r"`expert_ids_TK` must be on cpu as .*, got meta; m"):
        OF_IDS[name](IDS.to("meta"))


@pytest.mark.parametrize("name", OF_A_MATRIX)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64])
def test_numbers_are_floats_of_16_bits_or_more(name, dtype):
    with pytest.raises(TypeError, match=r"floating-point tensor of 16, 32 or 64 bits, got .*;"):
        OF_A_MATRIX[name](LOGITS.to(dtype))
    with pytest.raises(TypeError, match="must be a tensor, got list"):
        OF_A_MATRIX[name](LOGITS.tolist())


@pytest.mark.parametrize("name", OF_A_NUMBER)
@pytest.mark.parametrize("wrong", [None, "0.1", True, torch.tensor(0.1)], ids=str)
def test_options_are_numbers(name, wrong):
    with pytest.raises(TypeError, match=f"`{name}` must be a number, got {type(wrong).__name__}"):
        OF_A_NUMBER[name](wrong)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"impl": "cuda"}, ValueError, "`impl` must be one of .*, got 'cuda'"),
        (
            {"selection_bias": torch.zeros(E)},
            TypeError,
            "must be a `SelectionBias`, got Tensor; `ro",
        ),
        (
            {"dtype": torch.int32},
            TypeError,
            "`dtype` must be a floating-point dtype .*torch.int32",
        ),
        ({"dtype": torch.float8_e4m3fn}, TypeError, "`dtype` must be a floating-point dtype"),
    ],
)
def test_a_router_refuses_when_it_is_built(arguments, error, message):
    with pytest.raises(error, match=message):
        Router(4, E, K, **arguments)


@pytest.mark.parametrize("function", [stack_reports, GerrymanderAlarm(E, window=20).update])
def test_reports_come_in_a_list(function):
    with pytest.raises(
        TypeError, match=r"must be a list, one report a layer, got BalanceReport; g"
    ):
        function(REPORT)
    for wrong in (stack_reports([REPORT]), [SCORES], None):
        with pytest.raises(
            TypeError, match="a list of what `measure_balance` or `measure_load` re"
        ):
            function(wrong)
    function([measure_load(ROUTING.counts_E, SCORES.sum(0))])


def test_a_bias_is_a_tensor_and_gives_the_loss_no_dtype():
    bias = torch.linspace(-0.1, 0.1, E)
    loss = margin_balance_loss(SCORES, IDS, bias_E=bias)
    wide = margin_balance_loss(SCORES, IDS, bias_E=bias.double())
    assert wide.dtype == torch.float32
    assert torch.equal(loss, wide)
    with pytest.raises(TypeError, match="`bias_E` must be a tensor, got list"):
        margin_balance_loss(SCORES, IDS, bias_E=bias.tolist())


def test_counts_and_offsets_are_tensors():
    with pytest.raises(TypeError, match="`counts_E` must be a tensor, got list"):
        SelectionBias(E, 0.1).update([1] * E)
    with pytest.raises(TypeError, match="`offsets_E` must be a tensor, got list; give a row plan"):
        plan_tiles([1, 2], 4, 2)
