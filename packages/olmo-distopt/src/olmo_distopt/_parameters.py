"""Rules that the reducer, the optimizer and the norm share about lists of parameters."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import nn

T = TypeVar("T")

BUCKET_BYTES = 250 * 2**20


def trainable(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that require a gradient, in the order given.

    A frozen parameter is left out: it has no main gradient, no optimizer state and no part in the
    norm. A parameter has one name: a tied weight is listed once, as `nn.Module.named_parameters`
    does.

    Raises:
        ValueError: a name or a parameter comes twice, or a parameter is not contiguous.
    """
    names: set[str] = set()
    first_name: dict[nn.Parameter, str] = {}
    parameters: list[tuple[str, nn.Parameter]] = []
    for name, parameter in named_parameters:
        if name in names:
            raise ValueError(f"Each name must be listed once, got `{name}` twice.")
        if parameter in first_name:
            raise ValueError(
                f"Each parameter must be listed once, got the same one as "
                f"`{first_name[parameter]}` and `{name}`; list a tied weight under one name."
            )
        names.add(name)
        first_name[parameter] = name
        if not parameter.requires_grad:
            continue
        if not parameter.is_contiguous():
            raise ValueError(
                f"Parameter `{name}` must be contiguous, got shape {tuple(parameter.shape)} with "
                f"strides {parameter.stride()}; make it from `tensor.contiguous()`."
            )
        parameters.append((name, parameter))
    return parameters


def main_grad(name: str, parameter: nn.Parameter) -> torch.Tensor:
    """Return `parameter.main_grad`, the gradient summed over microbatches (and replicas).

    Raises:
        ValueError: there is none, or it has not the parameter's shape.
    """
    gradient = vars(parameter).get("main_grad")
    if gradient is None:
        raise ValueError(
            f"Parameter `{name}` must have a `main_grad`; build a `GradientReducer` over it first."
        )
    if gradient.shape != parameter.shape:
        raise ValueError(
            f"`main_grad` of `{name}` must have the parameter's shape {tuple(parameter.shape)}, "
            f"got {tuple(gradient.shape)}."
        )
    return gradient


def fill_buckets(
    items: Iterable[T],
    *,
    key: Callable[[T], tuple[str, ...]],
    num_bytes: Callable[[T], int],
    limit: int,
) -> list[list[T]]:
    """Group `items` by `key`, each group cut into runs of at most `limit` bytes.

    Args:
        items: in the order that every process shares.
        key: what the items of one bucket have in common; the group's name comes first.
        num_bytes: bytes of one item. An item above the limit gets a bucket of its own.
        limit: bytes a bucket, > 0.

    Returns:
        The buckets, sorted by key and then by order of arrival: the order of their collectives.
    """
    if limit <= 0:
        raise ValueError(f"`bucket_bytes` must be > 0, got {limit}.")
    buckets: dict[tuple[str, ...], list[list[T]]] = {}
    room: dict[tuple[str, ...], int] = {}
    for item in items:
        item_key, size = key(item), num_bytes(item)
        if size > room.get(item_key, -1):
            buckets.setdefault(item_key, []).append([])
            room[item_key] = limit
        buckets[item_key][-1].append(item)
        room[item_key] -= size
    return [bucket for item_key in sorted(buckets) for bucket in buckets[item_key]]
