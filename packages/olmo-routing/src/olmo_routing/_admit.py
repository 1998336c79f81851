"""Admission: which routes a rank of limited room keeps.

Every rank holds a buffer for `capacity` rows, shared by all of its experts. Before anything is
sent, all ranks exchange their requested counts and compute the same table with `admit`, so that
sender and receiver agree on what is dropped. A source keeps the first of its routes to an expert,
by token and slot, as many as the table says; `keep_routes` is how it picks them.

This module checks the arguments; the formulas are `admit` and `keep_routes` in `reference.py`.
Shapes: T tokens, K experts a token, S source ranks, Q destination ranks, E experts: of one
destination rank in `requested_SQE`, of all together in `kept_counts_E`.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from . import reference
from ._checks import (
    MOST_ROWS,
    can_read,
    check_expert_ids,
    check_positive,
    check_same_device,
    check_tensor,
)
from ._impl import Impl
from ._rows import plan_rows

Policy = Literal["fair", "tail"]


def admit(requested_SQE: Tensor, capacity: int, *, policy: Policy = "fair") -> Tensor:
    """Reduce requested counts until every destination rank fits into `capacity` rows.

    Args:
        requested_SQE: int32 or int64, not negative: the routes of source s to local expert e of
            destination q, below 2^31 in all for each destination. One rank alone with E experts is
            `counts_E.view(1, 1, E)`, where they share the room, and `counts_E.view(1, E, 1)` where
            each has a capacity of its own.
        capacity: rows a destination can hold, from 0 to 2^31 - 1.
        policy: "fair" drops in proportion to the request: each cell, and each expert summed over
            its sources, keeps its proportional share to within one route. "tail" keeps rows in
            their order (local expert, then source) until the room is used up, so that the drops
            always fall on the highest experts and sources.

    Returns:
        `kept_SQE` with `0 <= kept <= requested`, of the dtype of the requests. Both policies keep
        `min(capacity, requests)` routes of each destination. Source s then keeps the routes
        `keep_routes(expert_ids_TK, kept_SQE[s].flatten())`.

    Raises:
        TypeError: the counts are not int32 or int64, or the capacity is not an int.
        ValueError: a shape or range is not as above (counts are read on the CPU only), or the
            policy is unknown.

    Note:
        Integer arithmetic alone (int64): deterministic, and equal on every rank. Nothing is read
        back from the device.
    """
    check_positive("capacity", capacity, least=0, most=MOST_ROWS)
    if policy not in get_args(Policy):
        raise ValueError(f"`policy` must be one of {get_args(Policy)}, got {policy!r}.")
    _check_counts("requested_SQE", requested_SQE)
    if requested_SQE.ndim != 3 or requested_SQE.numel() == 0:
        raise ValueError(
            "`requested_SQE` must have three dimensions (sources, destinations, local experts), "
            f"none empty, got {tuple(requested_SQE.shape)}; of one rank alone give "
            "`counts_E.view(1, 1, -1)`."
        )
    if can_read(requested_SQE):
        # A sum of int64 may wrap, one of float64 does not.
        most = requested_SQE.double().sum((0, 2)).max().item()
        if most > MOST_ROWS:
            raise ValueError(
                f"`requested_SQE` must sum to less than 2^31 for each destination, got {most:.0f}."
            )
    return reference.admit(requested_SQE, capacity, policy)


def keep_routes(expert_ids_TK: Tensor, kept_counts_E: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Return the expert ids with -1 in place of every route that was not kept.

    Args:
        expert_ids_TK: int64 in [-1, E), the requested routes of this source.
        kept_counts_E: int32 or int64, not negative: how many routes to each expert are kept, the
            first ones by token and slot; all of them where there are no more. A table of `admit`
            gives source s `kept_SQE[s].flatten()`, since consecutive experts lie on one rank.
        impl: as in `plan_rows`, which orders the routes.

    Returns:
        `kept_ids_TK`, int64. `plan_rows` of it with any `align` plans the kept routes alone, and
        `measure_balance(kept_ids_TK=...)` reports what was lost. Weights stay what they are: a
        kept route counts as before, a dropped one not at all, and a token that lost some is made of
        less (`torch.where(kept_ids_TK < 0, 0.0, weights_TK)` says so in the weights).

    Raises:
        TypeError: a dtype is not as above.
        ValueError: a shape, range or device is not as above (values are read on the CPU only), or
            the named `impl` cannot run.

    Note:
        With `counts_E` of the ids, each expert keeps exactly `min(kept_counts_E, counts_E)` routes.
        Deterministic; nothing is read back from the device.
    """
    _check_counts("kept_counts_E", kept_counts_E)
    if kept_counts_E.ndim != 1 or kept_counts_E.numel() == 0:
        raise ValueError(
            "`kept_counts_E` must be a vector with one count an expert, "
            f"got shape {tuple(kept_counts_E.shape)}; of a table give `kept_SQE[source].flatten()`."
        )
    check_expert_ids(expert_ids_TK, len(kept_counts_E))
    check_same_device("kept_counts_E", kept_counts_E, "expert_ids_TK", expert_ids_TK)
    plan = plan_rows(expert_ids_TK, len(kept_counts_E), impl=impl)
    return reference.keep_routes(expert_ids_TK, kept_counts_E, plan.offsets_E, plan.rows_TK)


def _check_counts(name: str, counts: Tensor) -> None:
    check_tensor(name, counts)
    if counts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"`{name}` must be int32 or int64, got {counts.dtype}.")
    if can_read(counts) and bool((counts < 0).any()):
        raise ValueError(f"`{name}` must not be negative, got {int(counts.min())}.")
