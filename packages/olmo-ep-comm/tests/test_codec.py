"""Rows that travel as pairs: bitwise the pairs of one process, at 33/32 bytes a value."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_ep_comm import AllToAllDispatcher, Dispatcher, LocalDispatcher, PairCodec
from pair_codecs import MXFP8, decode, encode, round_trip
from torch import Tensor

NUM_EXPERTS, WIDTH = 8, 64


def make_inputs(seed: int, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, NUM_EXPERTS, (num_tokens, 3), generator=generator)
    x_TD = torch.randn(num_tokens, WIDTH, generator=generator).to(dtype)
    return x_TD, ids, torch.rand(num_tokens, 3, generator=generator)


def run_layer(dispatcher: Dispatcher, inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    x_TD, ids, weights_TK = inputs
    x_TD, weights_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    sent = dispatcher.dispatch(x_TD, ids, weights_TK)
    y_RD = sent.rows_RD * sent.row_weights_R[:, None].to(x_TD.dtype)
    y_RD.retain_grad()
    y_TD = dispatcher.combine(y_RD, sent.handle)
    y_TD.backward(torch.linspace(-1, 1, y_TD.numel()).view(y_TD.shape).to(y_TD.dtype))
    assert x_TD.grad is not None
    assert weights_TK.grad is not None
    assert y_RD.grad is not None
    values = {"rows": sent.rows_RD, "y": y_TD, "x": x_TD.grad, "weights": weights_TK.grad}
    if sent.encoded is not None:
        values["data"], values["scales"] = (part.view(torch.uint8) for part in sent.encoded)
    return {name: value.detach() for name, value in values.items()} | {"results": y_RD.grad}


@settings(max_examples=15, deadline=None)
@given(
    num_tokens=st.integers(0, 9),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    backward=st.booleans(),
)
def test_local_rows_are_the_decoded_tokens_and_gradients_pass_straight(
    num_tokens, seed, dtype, backward
):
    inputs = make_inputs(seed, num_tokens, dtype)
    codecs = {"codec": MXFP8, "backward_codec": MXFP8 if backward else None}
    got = run_layer(LocalDispatcher(num_experts=NUM_EXPERTS, **codecs), inputs)
    plain = (round_trip(inputs[0]), *inputs[1:])
    want = run_layer(LocalDispatcher(num_experts=NUM_EXPERTS), plain)
    assert torch.equal(got["rows"], want["rows"])
    assert torch.equal(got["y"], want["y"])
    assert torch.equal(
        decode(got["data"].view(torch.float8_e4m3fn), got["scales"], dtype), got["rows"]
    )
    gradients = round_trip(want["results"]) if backward else want["results"]
    assert torch.equal(got["results"], gradients)
    if not backward:
        assert torch.equal(got["x"], want["x"])
        assert torch.equal(got["weights"], want["weights"])


def _compare(rank: int, world: int, tokens: list[int]) -> list[int]:
    sizes, exchange = [], dist.all_to_all_single

    def logged(output, input, *arguments, **options):
        sizes.append(input.shape[1] if input.dtype == torch.uint8 else 0)
        return exchange(output, input, *arguments, **options)

    codecs = {"codec": MXFP8, "backward_codec": MXFP8}
    parts = [make_inputs(other, tokens[other], torch.bfloat16) for other in range(world)]
    whole = tuple(torch.cat(part) for part in zip(*parts, strict=True))
    dispatcher = AllToAllDispatcher(num_experts=NUM_EXPERTS, **codecs)
    dist.all_to_all_single = logged
    try:
        got = run_layer(dispatcher, parts[rank])
    finally:
        dist.all_to_all_single = exchange
    # One process encodes the same tokens, but the gradient of each rank's part of the result.
    want = run_layer(LocalDispatcher(num_experts=NUM_EXPERTS, codec=MXFP8), whole)
    assert torch.equal(got["y"], want["y"].split(tokens)[rank])
    per_rank = NUM_EXPERTS // world
    counts = [
        int(((whole[1] // per_rank == other) & (whole[1] >= 0)).sum()) for other in range(world)
    ]
    place = sum(counts[:rank])
    for name in ("rows", "data", "scales"):
        assert torch.equal(got[name], want[name][place : place + counts[rank]]), name
    return sizes


@pytest.mark.dist
@pytest.mark.parametrize("tokens", [[7, 0], [0, 0], [5, 9]])
def test_pairs_cross_ranks_as_one_row_bitwise(processes, tokens):
    for sizes in processes.run(_compare, tokens, world=2, timeout=60):
        # Agreement, notice; tokens as bytes, weights; results; gradients as bytes, back, weights.
        assert sizes == [0, 0, WIDTH * 33 // 32, 0, 0, WIDTH * 33 // 32, 0, 0]


@pytest.mark.parametrize(
    ("codec", "error", "message"),
    [
        (
            PairCodec(encode=lambda x: (x[:, :1].to(torch.uint8), encode(x)[1]), decode=decode),
            ValueError,
            r"data of shape \(4, 64\) and scales of shape \(4, S\), got \(4, 1\) and \(4, 2\)",
        ),
        (
            PairCodec(encode=lambda x: (encode(x)[0], encode(x)[1].float()), decode=decode),
            TypeError,
            "dtypes of one byte, got torch.float8_e4m3fn and torch.float32",
        ),
        (
            PairCodec(encode=encode, decode=lambda data, scales, dtype: data.float()),
            ValueError,
            r"must return torch.bfloat16 of shape \(\d+, 64\), got torch.float32",
        ),
    ],
)
def test_codecs_that_break_their_promise_are_refused(codec, error, message):
    inputs = make_inputs(0, 4, torch.bfloat16)
    with pytest.raises(error, match=message):
        LocalDispatcher(num_experts=NUM_EXPERTS, codec=codec).dispatch(*inputs)


def _mix(rank: int, world: int) -> list[str]:
    told = []
    for name in ("codec", "backward_codec"):
        options = {name: MXFP8} if rank else {}
        dispatcher = AllToAllDispatcher(num_experts=NUM_EXPERTS, **options)
        with pytest.raises(ValueError, match="dtype and encoded size on every rank") as caught:
            dispatcher.dispatch(*make_inputs(rank, 3, torch.bfloat16))
        told.append(str(caught.value))
    return told


@pytest.mark.dist
def test_ranks_must_agree_on_the_codecs(processes):
    plain = "width 64, torch.bfloat16, weights torch.float32"
    for of_tokens, of_gradients in processes.run(_mix, world=2, timeout=60):
        assert f"rank 0: {plain}; rank 1: width 64, torch.bfloat16 in 66 bytes" in of_tokens
        assert f"rank 0: {plain}; rank 1: {plain}, gradients in 66 bytes" in of_gradients
