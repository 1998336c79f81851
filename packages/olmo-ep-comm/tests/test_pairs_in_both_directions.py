"""Tokens and gradients of results that travel as pairs: the values of one process, everywhere."""

import sys

import deep_ep_stand_in
import pytest
import torch
from olmo_ep_comm import LocalDispatcher, VirtualRowwise, create_dispatcher
from pair_codecs import round_trip
from pair_layers import (
    CODECS,
    D,
    E,
    K,
    assert_equal_pairs,
    experts,
    make_inputs,
    run_pairs,
    run_pairs_locally,
    slope,
    values_of,
)

TOKENS = (6, 3)
SIZES = {"max_tokens": 6, "width": D, "top_k": K}
BACKENDS = {
    "all_to_all": {},
    "put": {**SIZES, "combine_by": "put"},
    "get": {**SIZES, "combine_by": "get"},
    "deepep": SIZES,
}


def test_one_process_decodes_the_encoded_gradients():
    """Against torch alone, so that what the backends are held to is right."""
    x_TD, ids, weights_TK = make_inputs(0, 6, torch.float32)
    got = run_pairs(LocalDispatcher(num_experts=E, **CODECS), (x_TD, ids, weights_TK))
    gradient_TD = round_trip(slope(x_TD))
    routed_TK = torch.where(ids < 0, 0, weights_TK)
    torch.testing.assert_close(got["x"], routed_TK.sum(1, keepdim=True) * gradient_TD)
    of_a_weight_T1 = (round_trip(x_TD) * gradient_TD).sum(1, keepdim=True)
    torch.testing.assert_close(got["weights"], of_a_weight_T1 * (ids >= 0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("combine_by", ["put", "get"])
def test_virtual_ranks_get_the_values_of_one_process(combine_by, dtype):
    parts = [make_inputs(rank, tokens, dtype) for rank, tokens in enumerate((6, 0, 5, 2))]
    ranks = VirtualRowwise(
        num_ranks=4, num_experts=E, dtype=dtype, combine_by=combine_by, **SIZES, **CODECS
    )
    tokens = [x.clone().requires_grad_() for x, _, _ in parts]
    weights = [w.clone().requires_grad_() for _, _, w in parts]
    sent = ranks.dispatch(tokens, [ids for _, ids, _ in parts], weights)
    results = list(map(experts, sent))
    sums = ranks.combine(results, sent[0].handle)
    torch.autograd.backward(sums, [slope(x) for x in tokens])
    for rank, want in enumerate(run_pairs_locally(parts)):
        home = {"y": sums[rank].detach(), "x": tokens[rank].grad, "weights": weights[rank].grad}
        got = values_of(sent[rank], results[rank]) | home
        assert_equal_pairs(got, want, exact=False)


def _send_both_ways(rank: int, world: int, backend: str) -> None:
    sys.modules["deep_ep"] = deep_ep_stand_in.make_module("2.1")
    for dtype in (torch.bfloat16, torch.float32)[: 1 if backend == "deepep" else 2]:
        options = {**BACKENDS[backend], **CODECS}
        name = "rowwise" if backend in ("put", "get") else backend
        if name == "rowwise":
            options["dtype"] = dtype
        dispatcher = create_dispatcher(name, num_experts=E, **options)
        parts = [make_inputs(other, TOKENS[other], dtype) for other in range(world)]
        got = run_pairs(dispatcher, parts[rank])
        assert_equal_pairs(got, run_pairs_locally(parts)[rank], exact=backend == "all_to_all")


@pytest.mark.dist
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_get_the_values_of_one_process(processes, backend):
    processes.run(_send_both_ways, backend, world=2)
