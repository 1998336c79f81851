"""Rows that travel as a pair: one-byte data and their scales, packed into one row of bytes.

MXFP8 (OCP Microscaling Formats, version 1.0) keeps one scale byte for 32 values, so that a value
takes 33/32 bytes on the wire where bfloat16 takes 2. The two functions of a codec are the caller's:
nothing here knows what the bytes mean, and every token is encoded once, however many its routes.
Gradients travel so in `send_gradients` of each exchange: `_routed_exchange`, `_rowwise.exchange`,
`_deepep`.

Shapes: N rows, D width, S scales a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCodec:
    """How rows become pairs and pairs become rows.

    Both functions must be deterministic, work row by row, and take no rows too.

    Attributes:
        encode: `encode(x_ND) -> (data_ND, scales_NS)`, both of a dtype of one byte.
        decode: `decode(data_ND, scales_NS, dtype) -> x_ND` in that dtype. It gets views whose rows
            are not contiguous.
    """

    encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor, torch.dtype], Tensor]

    def __post_init__(self) -> None:
        """Raise TypeError unless both are functions."""
        for name, value in (("encode", self.encode), ("decode", self.decode)):
            if not callable(value):
                raise TypeError(f"`{name}` must be a function, got {value!r}.")


def check_codecs(codec: PairCodec | None, backward_codec: PairCodec | None) -> None:
    """Raise TypeError unless each is a codec or None."""
    for name, value in (("codec", codec), ("backward_codec", backward_codec)):
        if value is not None and not isinstance(value, PairCodec):
            raise TypeError(
                f"`{name}` must be a PairCodec or None, got {value!r}; pass "
                "`PairCodec(encode=..., decode=...)`."
            )


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Pairs as rows of bytes, (N, D + S) uint8, with the dtypes of their two parts."""

    bytes_NB: Tensor
    width: int
    data_dtype: torch.dtype
    scale_dtype: torch.dtype

    def replace_bytes(self, bytes_NB: Tensor) -> "PackedRows":
        """Return other rows of the same form."""
        return PackedRows(bytes_NB, self.width, self.data_dtype, self.scale_dtype)

    def pair(self) -> tuple[Tensor, Tensor]:
        """Return the data (N, D) and the scales (N, S), both views."""
        data_ND, scales_NS = self.bytes_NB.split(
            [self.width, self.bytes_NB.shape[1] - self.width], 1
        )
        return data_ND.view(self.data_dtype), scales_NS.view(self.scale_dtype)


def pack_rows(codec: PairCodec, x_ND: Tensor) -> PackedRows:
    """Encode rows and put data and scales side by side.

    Raises:
        ValueError: If `codec.encode` does not return data of the shape of `x_ND` and a matrix of
            scales with as many rows.
        TypeError: If it returns a dtype of more than one byte.
    """
    data_ND, scales_NS = codec.encode(x_ND.detach())
    if data_ND.shape != x_ND.shape or scales_NS.ndim != 2 or len(scales_NS) != len(x_ND):
        raise ValueError(
            f"`codec.encode` must return data of shape {tuple(x_ND.shape)} and scales of shape "
            f"({len(x_ND)}, S), got {tuple(data_ND.shape)} and {tuple(scales_NS.shape)}."
        )
    if data_ND.itemsize != 1 or scales_NS.itemsize != 1:
        raise TypeError(
            f"`codec.encode` must return dtypes of one byte, got {data_ND.dtype} and "
            f"{scales_NS.dtype}; view the scales as torch.uint8 or torch.float8_e8m0fnu."
        )
    parts = [part.contiguous().view(torch.uint8) for part in (data_ND, scales_NS)]
    return PackedRows(torch.cat(parts, 1), x_ND.shape[1], data_ND.dtype, scales_NS.dtype)


def unpack_rows(codec: PairCodec, packed: PackedRows, dtype: torch.dtype) -> Tensor:
    """Decode rows.

    Raises:
        ValueError: If `codec.decode` does not return one row of the width and dtype for each.
    """
    x_ND = codec.decode(*packed.pair(), dtype)
    shape = (len(packed.bytes_NB), packed.width)
    if tuple(x_ND.shape) != shape or x_ND.dtype != dtype:
        raise ValueError(
            f"`codec.decode` must return {dtype} of shape {shape}, "
            f"got {x_ND.dtype} of shape {tuple(x_ND.shape)}."
        )
    return x_ND
