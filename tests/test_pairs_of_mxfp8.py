"""Rows that travel as pairs of olmo-ep-comm are multiplied by olmo-mxfp8 as they came."""

import pytest
import torch
from olmo_ep_comm import (
    AllToAllDispatcher,
    Dispatched,
    LocalDispatcher,
    PairCodec,
    VirtualRowwise,
)
from olmo_mxfp8 import MXTensor, dequantize, quantize, scaled_grouped_mm
from torch import Tensor

E, K, D, F = 4, 2, 64, 96
TOKENS = (9, 6)


def encode(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    pair = quantize(x_ND)
    return pair.data, pair.scales


def decode(data_ND: Tensor, scales_NS: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize(as_mx(data_ND, scales_NS), dtype)


def as_mx(data_ND: Tensor, scales_NS: Tensor) -> MXTensor:
    """The pair as a quantised matrix: what arrives is a view of wider rows."""
    return MXTensor(data_ND.contiguous(), scales_NS.contiguous(), 1, "e4m3")


CODEC = PairCodec(encode=encode, decode=decode)


def make_inputs(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    weights_TK, ids = torch.rand(TOKENS[rank], E, generator=generator).topk(K)
    ids[1, 0] = -1
    return torch.randn(TOKENS[rank], D, generator=generator).to(dtype), ids, weights_TK


def weights_of(local: range) -> MXTensor:
    generator = torch.Generator().manual_seed(7)
    return quantize(torch.randn(E, F, D, generator=generator)[local.start : local.stop])


def assert_product_of_what_came(sent: Dispatched, want_RD: Tensor, local: range) -> None:
    """Multiply `encoded`, without another quantisation, and the rows quantised after all."""
    assert sent.encoded is not None
    end, w_EFD = int(sent.offsets_E[-1]), weights_of(local)
    came = as_mx(*(part[:end] for part in sent.encoded))
    rows = quantize(want_RD)
    assert torch.equal(came.data.view(torch.uint8), rows.data.view(torch.uint8))
    assert torch.equal(came.scales, rows.scales)
    got, want = (
        scaled_grouped_mm(x, w_EFD, sent.offsets_E, out_dtype=torch.float32) for x in (came, rows)
    )
    assert torch.equal(got, want)
    assert got.abs().sum() > 0
    # The decoded form holds the same values: quantising that once more changes nothing.
    again = scaled_grouped_mm(
        quantize(sent.rows_RD[:end]), w_EFD, sent.offsets_E, out_dtype=torch.float32
    )
    assert torch.equal(again, want)


def rows_of_ranks(dtype: torch.dtype) -> list[Tensor]:
    """The rows of each rank as they are delivered without a codec."""
    parts = [make_inputs(rank, dtype) for rank in range(len(TOKENS))]
    x_TD, ids, weights_TK = (torch.cat(part) for part in zip(*parts, strict=True))
    sent = LocalDispatcher(num_experts=E).dispatch(x_TD, ids, weights_TK)
    cut = int(sent.offsets_E[E // len(TOKENS) - 1])
    return [sent.rows_RD[:cut], sent.rows_RD[cut:]]


def _send(rank: int, world: int, dtype: torch.dtype) -> None:
    dispatcher = AllToAllDispatcher(num_experts=E, codec=CODEC)
    sent = dispatcher.dispatch(*make_inputs(rank, dtype))
    assert_product_of_what_came(sent, rows_of_ranks(dtype)[rank], dispatcher.local_experts)


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_all_to_all_are_multiplied_as_they_came(processes, dtype):
    processes.run(_send, dtype, world=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_virtual_rowwise_are_multiplied_as_they_came(dtype):
    sizes = {"num_ranks": 2, "num_experts": E, "max_tokens": max(TOKENS), "width": D, "top_k": K}
    ranks = VirtualRowwise(**sizes, dtype=dtype, codec=CODEC)
    inputs = [make_inputs(rank, dtype) for rank in range(2)]
    sents = ranks.dispatch(*map(list, zip(*inputs, strict=True)))
    for rank, (sent, rows_RD) in enumerate(zip(sents, rows_of_ranks(dtype), strict=True)):
        assert_product_of_what_came(sent, rows_RD, ranks.local_experts(rank))
