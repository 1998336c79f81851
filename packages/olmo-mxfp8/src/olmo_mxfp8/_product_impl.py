"""Which implementation multiplies two MXFP8 operands."""

from typing import Literal, get_args

import torch

from . import _product_kernels
from ._formats import Granularity

ProductImpl = Literal["auto", "reference", "dequantise", "coarse", "native"]

AUTO: tuple[ProductImpl, ...] = ("coarse", "dequantise")
"""What "auto" may take on CUDA, best first: kernels that have run on the hardware they are for.

`native` has not: it has been compiled for Blackwell and no more.
"""


def check_product_impl(name: str, impl: str) -> None:
    """Raise `ValueError` unless `impl` names an implementation."""
    if impl not in get_args(ProductImpl):
        raise ValueError(f"`{name}` must be one of {get_args(ProductImpl)}, got {impl!r}.")


def pick_product(
    impl: ProductImpl,
    device: torch.device,
    granularities: tuple[Granularity, Granularity],
    num_rows: int,
    num_experts: int,
    *widths: int,
) -> ProductImpl:
    """Name the implementation that multiplies, or raise when the named one cannot.

    Args:
        impl: What the caller asked for.
        device: Where the operands are.
        granularities: Of the rows and of the weights.
        num_rows: R.
        num_experts: E.
        *widths: Every output width of the products.

    Raises:
        ValueError: `impl` is unknown, or cannot run.
    """
    check_product_impl("impl", impl)
    if impl == "reference" or (impl == "auto" and device.type != "cuda"):
        return "reference"
    for chosen in AUTO if impl == "auto" else (impl,):
        reason = _why_not(chosen, device, granularities, num_rows, num_experts, widths)
        if reason is None:
            return chosen
        if impl != "auto":
            raise ValueError(
                f"`impl={impl!r}` cannot run: {reason}; use another one, such as 'reference'."
            )
    return "reference"


def _why_not(
    impl: ProductImpl,
    device: torch.device,
    granularities: tuple[Granularity, Granularity],
    num_rows: int,
    num_experts: int,
    widths: tuple[int, ...],
) -> str | None:
    for width in widths:
        reason = _product_kernels.why_not(device, num_rows, num_experts, width)
        if reason:
            return reason
    if impl == "coarse":
        rows, weights = granularities
        if rows == 32 or weights != "128x128":
            return (
                "it needs rows with granularity=128 and weights with granularity='128x128', got "
                f"{rows!r} and {weights!r}"
            )
        return _why_not_hopper(device)
    if impl == "native":
        if device.type != "cuda":
            return "Triton's interpreter has no scaled product"
        return _product_kernels.why_not_generation(device.index, 10, 12)
    return None


def _why_not_hopper(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "Triton's interpreter does not know Hopper's units"
    generation = _product_kernels.why_not_generation(device.index, 9)
    return generation or _product_kernels.why_not_gluon()
