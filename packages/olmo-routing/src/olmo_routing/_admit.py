"""Admission: which routes a rank of limited room keeps.

Every rank holds a buffer for `capacity` rows, shared by all of its experts. Before anything is
sent, all ranks exchange their requested counts and compute this same table, so that sender and
receiver agree on what is dropped. A source keeps the first `kept` of its routes to an expert.

Shapes: S source ranks, Q destination ranks, E experts of one destination rank.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from . import reference
from ._checks import check_positive

Policy = Literal["fair", "tail"]


def admit(requested_SQE: Tensor, capacity: int, *, policy: Policy = "fair") -> Tensor:
    """Reduce requested counts until every destination rank fits into `capacity` rows.

    Args:
        requested_SQE: int32 or int64, not negative: the routes of source s to local expert e of
            destination q.
        capacity: rows a destination rank can hold, at least 0.
        policy: "fair" drops in proportion to the request: each cell, and each expert summed over
            its sources, keeps its proportional share to within one route. "tail" keeps rows in
            their order (local expert, then source) until the room is used up, so that the drops
            always fall on the highest experts and sources.

    Returns:
        `kept_SQE` with `0 <= kept <= requested`, of the dtype of the requests. Both policies keep
        `min(capacity, requests)` routes of each destination.

    Raises:
        TypeError: the counts are not int32 or int64, or the capacity is not an int.
        ValueError: a shape or range is not as above, or the policy is unknown.

    Note:
        Integer arithmetic alone (int64; a destination's requests times its capacity must stay below
        2^62): deterministic, and equal on every rank. Nothing is read back from the device.
    """
    check_positive("capacity", capacity, least=0)
    if policy not in get_args(Policy):
        raise ValueError(f"`policy` must be one of {get_args(Policy)}, got {policy!r}.")
    if requested_SQE.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"`requested_SQE` must be int32 or int64, got {requested_SQE.dtype}.")
    if requested_SQE.ndim != 3 or requested_SQE.numel() == 0:
        raise ValueError(
            "`requested_SQE` must have three dimensions (sources, destinations, local experts), "
            f"none empty, got {tuple(requested_SQE.shape)}."
        )
    return reference.admit(requested_SQE, capacity, policy)
