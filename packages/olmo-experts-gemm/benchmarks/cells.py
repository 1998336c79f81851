"""What one measurement is, and how one run is set."""

import dataclasses
import math
import statistics
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

OURS = "ours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run of the benchmark."""

    device: str
    impl: Any  # the package says which it knows
    budget_s: float
    least_rounds: int
    generator: torch.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One shape, one load, one thing measured, for us and for each peer.

    Attributes:
        topic: `"product"`, `"layer"`, `"memory"`, `"fine"` or `"first call"`.
        shape: Its name.
        case: The load or the routing.
        what: `"forward"`, `"wgrad"`, `"held"`, ...
        unit: Of the samples: `"ms"`, `"s"` or `"bytes"`.
        samples: Every repeat of each contender, by name.
        flops: Useful floating-point operations of one repeat; 0 where that means nothing.
        imbalance: Rows of the busiest expert over the mean.
        errors: The relative error between our result and each peer's, the worst of all outputs.
        host_ms: Median time that the host needs to launch one repeat.
        failure: Why contenders are missing, or empty.
        run: Which run of a report this is from.
    """

    topic: str
    shape: str
    case: str
    what: str
    unit: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    flops: float = 0.0
    imbalance: float = 1.0
    errors: dict[str, float] = field(default_factory=dict)
    host_ms: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    run: int = 0

    def median(self, name: str) -> float | None:
        """The median of one contender, or None."""
        samples = self.samples.get(name)
        return statistics.median(samples) if samples else None

    def tflops(self, name: str) -> float | None:
        """Useful TFLOP/s at the median, or None."""
        median = self.median(name)
        return self.flops / median / 1e9 if median and self.flops and self.unit == "ms" else None

    def ratio(self, peer: str) -> float | None:
        """Our speed over the peer's; for bytes, ours over theirs. None where one is missing."""
        ours, theirs = self.median(OURS), self.median(peer)
        if not ours or not theirs:
            return None
        return ours / theirs if self.unit == "bytes" else theirs / ours


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers, at least one."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def guarded(label: str, measure: Callable[[], list[Cell]], blank: Cell) -> list[Cell]:
    """Run `measure`; when it raises, print why and return `blank` with the reason in it.

    A device that no longer answers ends the run: nothing measured after that would mean anything.
    """
    try:
        return measure()
    except Exception as error:
        print(f"FAILED {label}: {error!r}"[:600], flush=True)
        traceback.print_exc(limit=-3)
        reason = f"{type(error).__name__}: {error}"[:300]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return [dataclasses.replace(blank, failure=reason)]
