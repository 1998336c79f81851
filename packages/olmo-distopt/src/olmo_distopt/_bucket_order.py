"""Parameters packed into buckets, and one order of all buckets' collectives.

A bucket holds what may travel together: one replica group, device and dtype, up to a number of
bytes. Members of a group list the same parameters in the same order, so they pack alike. But two
processes need not belong to the same groups, nor list the parameters of different groups in one
interleaving, and they must start the collectives they share in one order. So bucket `j` of the `n`
with the same key is placed at `(2 j + 1) / (2 n)`: numbers that all members of its group know, and
that keep the order of the list, since each key's buckets are spread over it evenly.
"""

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import TypeVar

T = TypeVar("T")

BUCKET_BYTES = 250 * 2**20


def fill_buckets(
    items: Iterable[T],
    *,
    key: Callable[[T], tuple[str, ...]],
    num_bytes: Callable[[T], int],
    limit: int,
) -> list[list[T]]:
    """Group `items` by `key`, each group cut into runs of at most `limit` bytes.

    Args:
        items: in the order in which the members of each replica group list them.
        key: what the items of one bucket have in common; the group's name comes first.
        num_bytes: bytes of one item. An item above the limit gets a bucket of its own.
        limit: bytes a bucket, > 0.

    Returns:
        The buckets in the order of their collectives, the same for every pair of processes.

    Raises:
        ValueError: `limit` is not above 0.
    """
    if limit <= 0:
        raise ValueError(f"`bucket_bytes` must be > 0, got {limit}.")
    filled: dict[tuple[str, ...], list[list[T]]] = {}
    room: dict[tuple[str, ...], int] = {}
    for item in items:
        item_key, size = key(item), num_bytes(item)
        if size > room.get(item_key, -1):
            filled.setdefault(item_key, []).append([])
            room[item_key] = limit
        filled[item_key][-1].append(item)
        room[item_key] -= size
    placed = [
        (Fraction(2 * index + 1, 2 * len(buckets)), item_key, bucket)
        for item_key, buckets in filled.items()
        for index, bucket in enumerate(buckets)
    ]
    return [bucket for _, _, bucket in sorted(placed, key=lambda entry: entry[:2])]
