"""What a benchmark measures, and how large."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of one run."""

    device: str
    rounds: int
    dry: bool
    ranks: int


@dataclass(slots=True, kw_only=True)
class Cell:
    """One question: milliseconds of each contender, taken in turn.

    Attributes:
        topic: the group of questions.
        what: the question, with its sizes.
        samples: milliseconds by contender.
        num_bytes: moved by one call, for a bandwidth; 0 where that says nothing.
        notes: further lines for the report.
    """

    topic: str
    what: str
    samples: dict[str, list[float]]
    num_bytes: int = 0
    notes: list[str] = field(default_factory=list)
