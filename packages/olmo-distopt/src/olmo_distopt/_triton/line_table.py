"""Many lines of elements for one launch: where they are, and which block of the grid has which.

A row of the table is the addresses of what belongs to one line, its number of elements and the
first block of the grid that is its own. The table is made on the host and goes to the device
without a wait; whoever launches keeps it as long as the addresses stay what they are, as they do
from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

Place = tuple[int, ...]
"""The addresses of what belongs to one line, and its number of elements."""

ALIGN = 16
"""Addresses and lengths that are multiples of it let a thread move 16 bytes at a time."""


class LineTable(NamedTuple):
    """The lines of one launch; a block is so many elements of one line.

    A step that is captured in a CUDA graph reads the table of its capture: the same optimizer must
    not step with tensors elsewhere while the graph is in use.

    Attributes:
        rows: int64 (lines, addresses + 2), on the device.
        owners: int32 (blocks), the line of each block.
    """

    rows: torch.Tensor
    owners: torch.Tensor


def make_line_table(places: Sequence[Place], block: int, device: torch.device) -> LineTable:
    """Return the table of lines at `places`, cut into blocks of `block` elements, on `device`."""
    rows = torch.tensor(places, dtype=torch.int64)
    blocks = (rows[:, -1] + block - 1) // block
    first = blocks.cumsum(0) - blocks
    owners = torch.arange(len(places), dtype=torch.int32).repeat_interleave(blocks)
    return LineTable(_upload(torch.cat([rows, first[:, None]], 1), device), _upload(owners, device))


def place_of(line: Sequence[torch.Tensor]) -> Place:
    """Return where the tensors of one line are, all of one length."""
    return (*(each.data_ptr() for each in line), line[0].numel())


def is_aligned(place: Place) -> bool:
    """Return whether all of a line starts and ends at a multiple of `ALIGN`."""
    return all(number % ALIGN == 0 for number in place)


def _upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return values
    return values.pin_memory().to(device, non_blocking=True)
