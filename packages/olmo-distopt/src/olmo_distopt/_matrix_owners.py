"""Who owns which matrix: each belongs whole to one replica, and the work is spread evenly.

A stack of expert matrices is a batch whose matrices are shared out in contiguous runs; single
matrices go, largest first, to the replica with the least work so far, by multiplications of an
orthogonalisation. The answer is the same on every replica, from what they all list.
"""

from torch import nn

from ._groups import ReplicaGroup
from ._partition import Range


def share_out(
    members: list[tuple[str, nn.Parameter, ReplicaGroup]],
) -> dict[str, list[Range] | None]:
    """Return the ranges of every matrix or stack by name: who owns what; None in a group of one.

    Args:
        members: `(name, parameter, group)`, the same on all members of each group.

    Raises:
        ValueError: a parameter has not two or three dimensions.
    """
    ranges: dict[str, list[Range] | None] = {}
    work: dict[str, list[int]] = {}
    for name, parameter, _ in members:
        if parameter.ndim not in (2, 3):
            raise ValueError(
                f"Parameter `{name}` must be a matrix or a stack of matrices for Muon, got shape "
                f"{tuple(parameter.shape)}; let `matrices` leave it to AdamW."
            )
    # Stacks first: their runs are given, and single matrices even out what they leave.
    for name, parameter, group in sorted(
        members, key=lambda m: (m[1].ndim == 2, -_multiplications(m[1]), m[0])
    ):
        size, numel = group.size, parameter.numel()
        if size == 1 or numel == 0:
            ranges[name] = None
            continue
        loads = work.setdefault(group.name, [0] * size)
        num_matrices = parameter.shape[0] if parameter.ndim == 3 else 1
        if num_matrices > 1:
            ends = [rank * num_matrices // size for rank in range(size + 1)]
        else:
            owner = loads.index(min(loads))
            ends = [int(rank > owner) for rank in range(size + 1)]
        each = numel // num_matrices
        ranges[name] = [
            Range(ends[rank] * each, (ends[rank + 1] - ends[rank]) * each) for rank in range(size)
        ]
        for rank in range(size):
            loads[rank] += (ends[rank + 1] - ends[rank]) * _multiplications(parameter)
    return ranges


def _multiplications(parameter: nn.Parameter) -> int:
    """Return those of one matrix's smaller product."""
    rows, columns = parameter.shape[-2:]
    return rows * columns * min(rows, columns)
