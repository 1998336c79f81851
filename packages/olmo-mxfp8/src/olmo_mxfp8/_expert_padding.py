"""The rows of each expert moved apart, so that each begins at a multiple of some number of rows.

Nothing is read back from the device: there is room for any split of the rows.

Shapes: M rows, E experts.
"""

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ._groups import Groups


def padded_size(num_rows: int, num_experts: int, multiple: int) -> int:
    """Return the rows that any split among the experts fits into."""
    return -(-num_rows // multiple) * multiple + multiple * num_experts


def padded_places(offsets_E: Tensor, num_rows: int, multiple: int) -> tuple[Tensor, Tensor]:
    """Return where each row goes, `(M,)`, and the padded ends of the experts, `(E,)`, both int64.

    Rows past the last offset go just behind the room for all, to `padded_size`.
    """
    nowhere = padded_size(num_rows, offsets_E.numel(), multiple)
    starts_E = torch.cat([offsets_E.new_zeros(1), offsets_E[:-1]])
    sizes_E = (offsets_E - starts_E + multiple - 1) // multiple * multiple
    ends_E = sizes_E.cumsum(0)
    rows_M = torch.arange(num_rows, device=offsets_E.device)
    owner_M = torch.searchsorted(offsets_E, rows_M, right=True)
    expert_M = owner_M.clamp(max=offsets_E.numel() - 1)
    places_M = (ends_E - sizes_E)[expert_M] + rows_M - starts_E[expert_M]
    return torch.where(owner_M < offsets_E.numel(), places_M, nowhere), ends_E


def pad_experts(rows: list[Tensor], groups: Groups, multiple: int) -> tuple[list[Tensor], Groups]:
    """Return tensors of (M, ..) with zeros behind each expert's rows, and where those now end."""
    M = rows[0].shape[0]
    places_M, ends_E = padded_places(groups.offsets_E, M, multiple)
    size = padded_size(M, groups.offsets_E.numel(), multiple)
    padded = [
        # One row more takes the rows that are nobody's.
        each.new_zeros(size + 1, *each.shape[1:]).index_copy_(0, places_M, each)[:size]
        for each in rows
    ]
    ends = None
    if groups.ends is not None:
        sizes = [end - start for start, end in pairwise([0, *groups.ends])]
        ends = list(accumulate(-(-size // multiple) * multiple for size in sizes))
    return padded, Groups(ends, ends_E.int())
