r"""Chance without state: every draw is a pure function of a purpose, a seed and a name.

    hash(purpose, seed, name) = blake2b("purpose\0seed\0name"), as a 128-bit integer

The same draw comes out on every machine, in every process and at every resume, and the draws of two
purposes are independent though they share the seed. Permutations sort the raw 64-bit words of a
Philox generator: NumPy keeps that stream fixed between releases, unlike that of
`Generator.permutation` (NEP 19). Those of more than 2**20 elements are never made whole: a Feistel
network (Luby and Rackoff, 1988) on the next even number of bits gives each element by itself, and
is applied again while it leaves the range (cycle walking; Black and Rogaway, 2002).
"""

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_LARGEST_SORTED = 2**20
_ROUNDS = 8


def seeded_hash(purpose: str, seed: int, name: str | int) -> int:
    """Return an integer in [0, 2**128) that these three decide.

    Args:
        purpose: What the draw is for; it must not contain a NUL.
        seed: The seed of the run, any integer.
        name: What is drawn for: a document id or an epoch.
    """
    # File names that are not UTF-8 reach Python as lone surrogates.
    message = f"{purpose}\0{seed}\0{name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(message, digest_size=16).digest(), "little")


def seeded_permutation(size: int, purpose: str, seed: int, name: str | int) -> NDArray[np.int64]:
    """Return a permutation of `range(size)` that purpose, seed and name decide; int64 (size,)."""
    words = np.random.Philox(key=seeded_hash(purpose, seed, name)).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def permuted_range(
    start: int, stop: int, size: int, purpose: str, seed: int, name: str | int
) -> NDArray[np.int64]:
    """Return elements `start` to `stop` of a permutation of `range(size)`; int64 (stop - start,).

    Purpose, seed and name decide the permutation. Time and memory go with `stop - start` when
    `size` is above 2**20; smaller permutations are made whole and remembered.
    """
    if size <= _LARGEST_SORTED:
        return _remembered(size, purpose, seed, name)[start:stop]
    return feistel_permutation(np.arange(start, stop), size, seeded_hash(purpose, seed, name))


# Two epochs of each source of a mixture, at most 8 MiB each.
@lru_cache(maxsize=32)
def _remembered(size: int, purpose: str, seed: int, name: str | int) -> NDArray[np.int64]:
    permutation = seeded_permutation(size, purpose, seed, name)
    permutation.flags.writeable = False
    return permutation


def feistel_permutation(positions: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Return where a keyed permutation of `range(size)` puts each position.

    Args:
        positions: int64 (n,) in [0, size).
        size: At most 2**62.
        key: Decides the permutation, in [0, 2**128).
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = np.uint64(2**half_bits - 1)
    keys = np.random.Philox(key=key).random_raw(_ROUNDS)
    values = positions.astype(np.uint64)
    walking = np.arange(len(values))
    while len(walking):
        values[walking] = _feistel(values[walking], np.uint64(half_bits), half_mask, keys)
        walking = walking[values[walking] >= np.uint64(size)]
    return values.astype(np.int64)


def _feistel(
    values: NDArray[np.uint64],
    half_bits: np.uint64,
    half_mask: np.uint64,
    keys: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    left, right = values >> half_bits, values & half_mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & half_mask)
    return (left << half_bits) | right


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter the bits of each word: the finalizer of SplitMix64 (Steele et al., 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
