"""The two element formats of MXFP8, and the choices that a caller can make.

A finite element with sign `s`, exponent `e` and mantissa `m` of `M` bits is

    (-1)^s * 2^e * (1 + m / 2^M)

Below the smallest normal exponent the spacing stays `2^(min_exponent - M)`, down to zero. E4M3 has
no infinity and one NaN; E5M2 has both. The largest value of either is `1.75 * 2^max_exponent`, so
one rule finds the scale for both.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3 and 6.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

Element = Literal["e4m3", "e5m2"]
ScaleRule = Literal["rceil", "floor"]
Granularity = Literal[32, 128, "128x128"]
RowGranularity = Literal[32, 128]
WeightGranularity = Literal[32, "128x128"]

BLOCK = 32  # values that share one scale byte
COARSE = 128  # values along a dimension whose four scale bytes are the same


@dataclass(frozen=True, slots=True)
class Format:
    """What the arithmetic needs to know of an element format."""

    dtype: torch.dtype
    mantissa_bits: int
    min_exponent: int  # of the smallest normal number
    max_exponent: int
    max_code: int  # the largest finite number, without sign


FORMATS: dict[Element, Format] = {
    "e4m3": Format(torch.float8_e4m3fn, 3, min_exponent=-6, max_exponent=8, max_code=0x7E),
    "e5m2": Format(torch.float8_e5m2, 2, min_exponent=-14, max_exponent=15, max_code=0x7B),
}


SOURCES = (torch.float32, torch.bfloat16, torch.float16)
"""What can be quantised: every value of these dtypes is one of FP32."""


def check_element(name: str, element: object) -> None:
    """Raise `ValueError` unless `element` names a format."""
    if not isinstance(element, str) or element not in FORMATS:
        raise ValueError(f"`{name}` must be 'e4m3' or 'e5m2', got {element!r}.")


def check_scale_rule(scale_rule: object) -> None:
    """Raise `ValueError` unless `scale_rule` is one of the choices."""
    if scale_rule not in get_args(ScaleRule):
        raise ValueError(f"`scale_rule` must be 'rceil' or 'floor', got {scale_rule!r}.")


def check_tensor(name: str, value: object) -> None:
    """Raise `TypeError` unless `value` is a tensor of torch."""
    if isinstance(value, torch.Tensor):
        return
    kind = type(value).__name__
    how = "`dequantize` gives its values" if kind == "MXTensor" else "`torch.as_tensor` makes one"
    raise TypeError(f"`{name}` must be a torch.Tensor, got {kind}; {how}.")


def check_source(name: str, tensor: torch.Tensor) -> None:
    """Raise `TypeError` unless `tensor` can be quantised: every value of it is one of FP32."""
    check_tensor(name, tensor)
    check_source_dtype(name, tensor.dtype)
    if tensor.is_nested:
        raise TypeError(
            f"`{name}` must be dense, got a nested tensor; call `.to_padded_tensor(0.0)` first."
        )
    # The compiler lets no backward ask for a layout, and itself traces dense tensors alone.
    if not torch.compiler.is_compiling() and tensor.layout is not torch.strided:
        raise TypeError(
            f"`{name}` must be dense, got layout {tensor.layout}; call `.to_dense()` first."
        )


def check_source_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise `TypeError` unless values of `dtype` can be quantised."""
    if dtype not in SOURCES:
        raise TypeError(
            f"`{name}` must be float32, bfloat16 or float16, got {dtype}; "
            f"the format is defined from FP32 values: call `.float()` first."
        )


def check_row_weights(row_weights_R: torch.Tensor, name: str, rows: torch.Tensor) -> None:
    """Raise unless `row_weights_R` holds one weight for each of `rows`, on their device."""
    check_source("row_weights_R", row_weights_R)
    R = rows.shape[0]
    if tuple(row_weights_R.shape) != (R,) or row_weights_R.device != rows.device:
        raise ValueError(
            f"`row_weights_R` must be {(R,)} on {rows.device}, as `{name}`, got "
            f"{tuple(row_weights_R.shape)} on {row_weights_R.device}."
        )


def check_dim(dim: object) -> None:
    """Raise `TypeError` unless `dim` is an integer."""
    if not isinstance(dim, int):
        raise TypeError(f"`dim` must be an int, got {dim!r}; name one dimension by its index.")


def check_blocks(what: str, size: int, granularity: int) -> None:
    """Raise `ValueError` unless `size` values divide into whole blocks."""
    if size % granularity:
        padded = -(-size // granularity) * granularity
        raise ValueError(
            f"{what} must be a multiple of {granularity} (`granularity`), got {size}; "
            f"zero-pad it to {padded}, or keep this operand in high precision."
        )


def _is_choice(granularity: object, choices: object) -> bool:
    # Equal numbers of other types, 128.0 or one of numpy, are no sizes to torch.
    return isinstance(granularity, (int, str)) and granularity in get_args(choices)


def check_row_granularity(granularity: object) -> None:
    """Raise `ValueError` unless `granularity` is one that rows can have."""
    if not _is_choice(granularity, RowGranularity):
        raise ValueError(f"`granularity` must be 32 or 128, got {granularity!r}.")


def check_weight_granularity(granularity: object) -> None:
    """Raise `ValueError` unless `granularity` is one that weights can have."""
    if not _is_choice(granularity, WeightGranularity):
        raise ValueError(f"`granularity` must be 32 or '128x128', got {granularity!r}.")


def check_granularity(name: str, shape: torch.Size, dim: int, granularity: Granularity) -> None:
    """Raise `ValueError` unless `granularity` is a choice and fits a tensor along `dim`."""
    if not _is_choice(granularity, Granularity):
        raise ValueError(f"`granularity` must be 32, 128 or '128x128', got {granularity!r}.")
    if granularity != "128x128":
        check_blocks(f"`{name}.shape[{dim}]`", shape[dim], granularity)
        return
    if dim < len(shape) - 2 or len(shape) < 2:
        raise ValueError(
            f"`granularity='128x128'` shares scales over the last two dimensions, so `dim` must be "
            f"one of those, got {dim} for `{name}` of shape {tuple(shape)}."
        )
    for each in (len(shape) - 2, len(shape) - 1):
        check_blocks(f"`{name}.shape[{each}]`", shape[each], COARSE)
