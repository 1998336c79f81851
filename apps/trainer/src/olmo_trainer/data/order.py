"""Which sequences a step trains on: a function of the step, with nothing to save or to restore.

One source. Epoch e visits the n sequences in a permutation that (seed, e) decides. The epochs, one
after the other, make an endless list, and step s takes

    positions [s*B, (s+1)*B) of permutation(seed, 0) + permutation(seed, 1) + ...

A batch may cross the end of an epoch, so none is short and no sequence is left over: each comes
exactly once an epoch.

Several sources. Each has such a list of its own. The positions of all are cut into blocks of
M = 65536; source i has q_i places of each block, its weight rounded to whole places (largest
remainders, at least 1), and draw k of those is put at the (k + u) / q_i of the block, u chance in
[0, 1) of (seed, block). So any run of L positions holds L q_i / M from source i of k, to within
2 + 2 k q_i / M, and how far a list has been read is whole blocks and a count in the last one.

Where the batch grows at first (`batch_warmup`), a step begins where the one before it ended.

Nothing here knows of ranks, microbatches or workers. That makes a resume (`step` is all it needs)
and a change of layout safe by construction.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from olmo_trainer.data.batch_warmup import BatchWarmup
from olmo_trainer.data.seeded import permuted_range, seeded_hash

BLOCK = 2**16


@dataclass(frozen=True, slots=True)
class Share:
    """What a source gives to the order.

    Attributes:
        num_sequences: n, the sequences of one pass over it.
        name: Enters its permutations; empty for a sole source.
        weight: Its part of the positions, relative to the other sources'; above 0.
        max_passes: How often it may be read, above 0, 1.5 = half of it a second time; `None` =
            without end.

    Raises:
        ValueError: A number is out of range.
    """

    num_sequences: int
    name: str = ""
    weight: float = 1.0
    max_passes: float | None = None

    def __post_init__(self) -> None:
        if self.num_sequences < 1:
            raise ValueError(f"`num_sequences` must be at least 1, got {self.num_sequences}.")
        if not 0 < self.weight < math.inf:
            raise ValueError(f"`weight` must be above 0, got {self.weight}; leave the source out.")
        if self.max_passes is not None and not 0 < self.max_passes < math.inf:
            raise ValueError(f"`max_passes` must be above 0, got {self.max_passes}.")

    @property
    def limit(self) -> int | None:
        """How many sequences may be drawn, repeats counted; `None` = any number."""
        return None if self.max_passes is None else math.floor(self.max_passes * self.num_sequences)

    def draws(self, start: int, stop: int, seed: int) -> NDArray[np.int64]:
        """Return draws [start, stop) of the endless list of this source, int64 in [0, n)."""
        pieces: list[NDArray[np.int64]] = []
        while start < stop:
            epoch, first = divmod(start, self.num_sequences)
            last = min(first + stop - start, self.num_sequences)
            name = f"{self.name} {epoch}" if self.name else epoch
            pieces.append(
                permuted_range(first, last, self.num_sequences, "train order", seed, name)
            )
            start += last - first
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class TrainOrder:
    """The order of training.

    Attributes:
        shares: The sources, at least one, with different names.
        batch_sequences: B, the sequences of a step over all ranks; it may exceed what there is,
            and a step then sees a sequence more than once.
        seed: The seed of the run.
        warmup: How the batch grows to B in the first steps; `None` = it is B from the first.

    Raises:
        ValueError: A number is below 1, names or sources are missing, or the warm-up does not
            reach B.
    """

    shares: Sequence[Share]
    batch_sequences: int
    seed: int
    warmup: BatchWarmup | None = None

    def __post_init__(self) -> None:
        if self.batch_sequences < 1:
            raise ValueError(f"`batch_sequences` must be at least 1, got {self.batch_sequences}.")
        if self.warmup is not None:
            missing = self.batch_sequences - self.warmup.start
            if missing < 1 or missing % self.warmup.increment:
                raise ValueError(
                    f"`warmup` must reach `batch_sequences`={self.batch_sequences} by whole "
                    f"increments, got {self.warmup}."
                )
        if not 1 <= len(self.shares) <= BLOCK:
            raise ValueError(f"there must be 1 to {BLOCK} sources, got {len(self.shares)}.")
        if len({share.name for share in self.shares}) < len(self.shares):
            raise ValueError("the sources of a mixture must have different names.")

    @cached_property
    def quotas(self) -> tuple[int, ...]:
        """Each source's places in a block of 65536 positions."""
        return apportion([share.weight for share in self.shares], BLOCK)

    def size(self, step: int) -> int:
        """Return the number of sequences of `step`: B, or less while the batch grows."""
        return (
            self.batch_sequences
            if self.warmup is None
            else self.warmup.size(step, self.batch_sequences)
        )

    def position(self, step: int) -> int:
        """Return how many sequences all steps before `step` drew."""
        return (
            step * self.batch_sequences
            if self.warmup is None
            else self.warmup.position(step, self.batch_sequences)
        )

    def sequences(self, step: int) -> NDArray[np.int64]:
        """Return the sequences of the global batch of `step`, int64 (size,) in [0, sum of n).

        The sequences of the second source are numbered after those of the first, and so on.

        Raises:
            ValueError: `step` is negative.
        """
        if step < 0:
            raise ValueError(f"`step` must be at least 0, got {step}; the first step is 0.")
        start, stop = self.position(step), self.position(step + 1)
        sources = self._sources(start, stop)
        drawn = np.empty(len(sources), np.int64)
        offsets = accumulate((share.num_sequences for share in self.shares), initial=0)
        read, read_after = self.draws(start), self.draws(stop)
        for source, (share, offset) in enumerate(zip(self.shares, offsets, strict=False)):
            drawn[sources == source] = offset + share.draws(
                read[source], read_after[source], self.seed
            )
        return drawn

    def draws(self, position: int) -> tuple[int, ...]:
        """Return how many of the first `position` places each source has; they sum to it."""
        block, place = divmod(position, BLOCK)
        part = np.bincount(self._sources(block * BLOCK, position), minlength=len(self.shares))
        assert int(part.sum()) == place, "a block's places are each of one source"
        return tuple(
            block * quota + count for quota, count in zip(self.quotas, part.tolist(), strict=True)
        )

    def passes(self, num_steps: int) -> dict[str, float]:
        """Return how often each source has been read after `num_steps` steps, by name."""
        draws = self.draws(self.position(num_steps))
        return {
            share.name: count / share.num_sequences
            for share, count in zip(self.shares, draws, strict=True)
        }

    @cached_property
    def max_steps(self) -> int | None:
        """The most whole steps that every `max_passes` allows; `None` = any number.

        A last batch that the text cannot fill is not trained on.
        """
        limits = [share.limit for share in self.shares]
        if all(limit is None for limit in limits):
            return None
        low, high = 0, 1
        while self._within(high, limits):
            low, high = high, 2 * high
        while high - low > 1:  # the first `low` steps are within the limits, `high` are not
            middle = (low + high) // 2
            low, high = (middle, high) if self._within(middle, limits) else (low, middle)
        return low

    def _within(self, num_steps: int, limits: Sequence[int | None]) -> bool:
        draws = self.draws(self.position(num_steps))
        return all(
            limit is None or count <= limit for count, limit in zip(draws, limits, strict=True)
        )

    def _sources(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the source of each position in [start, stop), int64."""
        if len(self.shares) == 1:
            return np.zeros(stop - start, np.int64)
        pieces: list[NDArray[np.int64]] = []
        while start < stop:
            block, first = divmod(start, BLOCK)
            last = min(first + stop - start, BLOCK)
            pieces.append(_block_sources(self.quotas, self.seed, block)[first:last])
            start += last - first
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)


def apportion(weights: Sequence[float], places: int) -> tuple[int, ...]:
    """Divide `places` in proportion to `weights`, whole and at least 1 each, by largest remainder.

    Equal remainders go to the earlier.
    """
    total, free = math.fsum(weights), places - len(weights)
    exact = [weight / total * places for weight in weights]
    # One place each is given first; a weight worth less than that takes nothing from the rest.
    wanted = [max(0.0, each - 1) for each in exact]
    scale = free / math.fsum(wanted) if free else 0.0
    quotas = [math.floor(each * scale) for each in wanted]
    by_remainder = sorted(
        range(len(weights)), key=lambda index: (quotas[index] - wanted[index] * scale, index)
    )
    for index in by_remainder[: free - sum(quotas)]:
        quotas[index] += 1
    return tuple(quota + 1 for quota in quotas)


@lru_cache(maxsize=8)
def _block_sources(quotas: tuple[int, ...], seed: int, block: int) -> NDArray[np.int64]:
    """Return the source of each place of a block, int64 (65536,)."""
    words = np.random.Philox(key=seeded_hash("mixture", seed, block)).random_raw(BLOCK)
    chance = (words >> np.uint64(11)) * 2.0**-53  # [0, 1), float64
    counts = np.array(quotas)
    sources = np.repeat(np.arange(len(quotas)), counts)
    ranks = np.arange(BLOCK) - np.repeat(np.cumsum(counts) - counts, counts)
    times = (ranks + chance) / counts[sources]
    order = np.argsort(times, kind="stable")
    placed = sources[order]
    placed.flags.writeable = False
    return placed
