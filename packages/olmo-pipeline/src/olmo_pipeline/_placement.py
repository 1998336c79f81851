"""Which rank holds which stage.

    placement   stage s on rank          stages of rank r (two chunks)
    loop        s % P                    r, r + P
    v           min(s, 2 P - 1 - s)      r, 2 P - 1 - r

On the loop every chunk runs through the ranks in the same direction, and the first ranks keep their
activations longest. On the V the second chunk runs back: each rank holds one early and one late
stage, so all keep activations for the same time, and rank 0 holds the first and the last stage.
"""

from numbers import Integral
from typing import Literal

Placement = Literal["loop", "v"]


def place_stages(num_ranks: int, num_chunks: int, placement: Placement) -> tuple[int, ...]:
    """Return the rank of each of `num_ranks * num_chunks` stages.

    With more than two chunks the V becomes a zigzag: every other chunk runs back.

    Raises:
        ValueError: If a number is below 1 or the placement is unknown.
    """
    at_least_one(num_ranks=num_ranks, num_chunks=num_chunks)
    if placement not in ("loop", "v"):
        raise ValueError(f'`placement` must be "loop" or "v", got {placement!r}.')
    there = tuple(range(num_ranks))
    ranks: tuple[int, ...] = ()
    for chunk in range(num_chunks):
        ranks += there[::-1] if placement == "v" and chunk % 2 else there
    return ranks


def at_least_one(**sizes: int) -> None:
    """Raise `ValueError` if a size is below 1, `TypeError` if it is no whole number."""
    for name, size in sizes.items():
        if not is_whole(size):
            raise TypeError(f"`{name}` must be a whole number, got {size!r}.")
        if size < 1:
            raise ValueError(f"`{name}` must be at least 1, got {size}.")


def is_whole(value: object) -> bool:
    """Whether it is a whole number, of Python or numpy."""
    return isinstance(value, Integral) and not isinstance(value, bool)
