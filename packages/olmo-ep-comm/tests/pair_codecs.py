"""A codec of E4M3 data with one power-of-two scale byte for 32 values, for the tests."""

import torch
from olmo_ep_comm import PairCodec
from torch import Tensor

BLOCK = 32


def encode(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x_ND.float().unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(2).clamp(min=2.0**-100)
    exponents = (largest / 448).log2().ceil()
    data = (blocks * torch.exp2(-exponents)[..., None]).flatten(1).to(torch.float8_e4m3fn)
    return data, (exponents + 127).to(torch.uint8)


def decode(data_ND: Tensor, scales_NS: Tensor, dtype: torch.dtype) -> Tensor:
    scale_NS = torch.exp2(scales_NS.float() - 127)
    return (data_ND.float().unflatten(1, (-1, BLOCK)) * scale_NS[..., None]).flatten(1).to(dtype)


MXFP8 = PairCodec(encode=encode, decode=decode)
CAST = PairCodec(  # pairs whose scales have no columns
    encode=lambda x_ND: (x_ND.to(torch.float8_e4m3fn), torch.empty(len(x_ND), 0).byte()),
    decode=lambda data_ND, scales_NS, dtype: data_ND.to(dtype),
)


def round_trip(x_ND: Tensor) -> Tensor:
    return decode(*encode(x_ND), x_ND.dtype)
