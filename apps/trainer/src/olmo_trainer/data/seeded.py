r"""Chance without state: every draw is a pure function of a purpose, a seed and a name.

    hash(purpose, seed, name) = blake2b("purpose\0seed\0name"), as a 128-bit integer

The same draw comes out on every machine, in every process and at every resume, and the draws of two
purposes are independent though they share the seed. Permutations sort the raw 64-bit words of a
Philox generator: NumPy keeps that stream fixed between releases, unlike that of
`Generator.permutation` (NEP 19).
"""

import hashlib

import numpy as np
from numpy.typing import NDArray


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
