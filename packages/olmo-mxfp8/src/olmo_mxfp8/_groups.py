"""Where the rows of each expert end: what a caller may give, and the form that products take."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ._formats import check_tensor
from ._product_impl import ProductImpl


@dataclass(frozen=True, slots=True)
class Groups:
    """Where the rows of each expert end, also as integers where the reference needs them."""

    ends: list[int] | None
    offsets_E: Tensor


def whole(num_rows: int, device: torch.device, impl: ProductImpl) -> Groups:
    """Return the groups of a product that is not grouped: all rows are one expert's."""
    end = torch.full((1,), num_rows, dtype=torch.int32, device=device)
    return Groups([num_rows] if impl == "reference" else None, end)


def read_groups(
    offsets_E: Tensor,
    num_experts: int,
    num_rows: int,
    device: torch.device,
    impl: ProductImpl,
) -> Groups:
    """Return the groups in the form that `impl` takes, or raise what `scaled_grouped_mm` says."""
    check_offsets(offsets_E, device, num_experts)
    if device.type == "meta":
        # No values to read, and none that the shapes depend on.
        return Groups([0] * (num_experts - 1) + [num_rows], offsets_E)
    if impl == "reference" or device.type == "cpu":
        return Groups(read_offsets(offsets_E, num_rows), offsets_E)
    return Groups(None, offsets_E)


def check_offsets(offsets_E: Tensor, device: torch.device, num_experts: int | None = None) -> None:
    """Raise unless `offsets_E` can be the ends of experts on `device`; reads no values.

    Args:
        offsets_E: What the caller gave.
        device: Where the rows are.
        num_experts: How many ends there must be; any number from 1 on when None.
    """
    check_tensor("offsets_E", offsets_E)
    if offsets_E.dtype != torch.int32:
        raise TypeError(f"`offsets_E` must be int32, got {offsets_E.dtype}; call `.int()` on it.")
    expected = "(E,)" if num_experts is None else f"({num_experts},)"
    count = offsets_E.numel() if num_experts is None else num_experts
    if tuple(offsets_E.shape) != (count,) or count == 0:
        raise ValueError(
            f"`offsets_E` must have one end for each of at least one expert, {expected}, "
            f"got {tuple(offsets_E.shape)}."
        )
    if offsets_E.device != device:
        raise ValueError(
            f"`offsets_E` must be on the device of the rows, {device}, got {offsets_E.device}."
        )


def read_offsets(offsets_E: Tensor, num_rows: int) -> list[int]:
    """Return the offsets as integers; raises `ValueError` where they are no ends of rows."""
    ends = offsets_E.tolist()
    if ends != sorted(ends) or ends[0] < 0 or ends[-1] > num_rows:
        raise ValueError(
            f"`offsets_E` must ascend from at least 0 to at most the number of rows, {num_rows}; "
            f"it does not. Pass the running sum of the rows of each expert."
        )
    return ends
