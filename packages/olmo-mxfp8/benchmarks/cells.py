"""What one measurement is, and how one run is set."""

import statistics
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run of the benchmark."""

    device: str
    budget_s: float
    least_rounds: int
    generator: torch.Generator

    @property
    def is_dry(self) -> bool:
        """Whether this is a CPU, on which the kernels and the peers' do not run."""
        return self.device == "cpu"

    @property
    def impl(self) -> Literal["reference", "triton"]:
        """What quantises: on a device the kernels, also those that "auto" does not take."""
        return "reference" if self.is_dry else "triton"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One thing measured at one shape, for everything that can do it.

    Attributes:
        topic: `"quantise"`, `"product"`, `"width"`, `"experts"` or `"memory"`.
        shape: Its name.
        load: How rows are split among experts, or empty.
        what: What is done.
        samples: Every repeat of each contender in milliseconds; bytes for `"memory"`.
        work: Bytes moved (`"quantise"`) or useful floating-point operations of one repeat.
        errors: The relative error of each contender's result.
        failures: Why contenders are missing, by name.
    """

    topic: str
    shape: str
    load: str
    what: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def median(self, name: str) -> float | None:
        """The median of one contender, or None."""
        samples = self.samples.get(name)
        return statistics.median(samples) if samples else None

    def rate(self, name: str) -> float | None:
        """Work a second, in tera, or None."""
        median = self.median(name)
        return self.work[name] / median / 1e9 if median and name in self.work else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Something that can do the work of a cell.

    Attributes:
        call: Does it once.
        work: As in `Cell`.
        error: The relative error of what a call gave, or None where it is the yardstick.
        limit: The error from which on the result is wrong and no number is given.
    """

    call: Callable[[], object]
    work: float
    error: Callable[[object], float] | None = None
    limit: float = 0.0


def contend(
    blank: Cell,
    makers: dict[str, Callable[[], Contender]],
    time: Callable[[dict[str, Callable[[], object]]], dict[str, list[float]]],
) -> Iterator[Cell]:
    """Check every contender, time those that are right, and give the cell.

    One that raises or is wrong is named with its reason and leaves the others' numbers standing.
    """
    calls: dict[str, Callable[[], object]] = {}
    for name, make in makers.items():
        try:
            contender = make()
            result = contender.call()
            if contender.error is not None:
                blank.errors[name] = error = contender.error(result)
                if not error <= contender.limit:
                    raise ValueError(
                        f"the result is off by {error:.1e}, {contender.limit:.0e} at most"
                    )
        except Exception as error:
            if not isinstance(error, (ImportError, ValueError, AssertionError)):
                traceback.print_exc(limit=-3)
            blank.failures[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        calls[name], blank.work[name] = contender.call, contender.work
    if calls:
        blank.samples.update(time(calls))
    rates = ", ".join(
        f"{name} {rate:.1f}" for name in calls if (rate := blank.rate(name)) is not None
    )
    print(f"{blank.topic} {blank.shape} {blank.load} {blank.what}: {rates}", flush=True)
    for name, reason in blank.failures.items():
        print(f"  no {name}: {reason}", flush=True)
    yield blank
