"""How long each rank works of its own in a step, and which one the others wait for.

A rank's own time is that of its data, forward and backward: what comes before it waits for others
in the reduction. Expert and pipeline ranks wait for each other within these phases too, so a slow
rank shows less there, or as a slow group.
"""

from collections.abc import Mapping
from statistics import median_low

from olmo_trainer.mesh import Mesh
from olmo_trainer.metrics import RanksRecord

OWN_PHASES = ("data", "forward", "backward")
SLOW = 1.5  # times the median rank


class RankTimes:
    """Sums this rank's own time, and gathers all ranks' once in a while."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._seconds, self._steps = 0.0, 0

    def add(self, phases: Mapping[str, float]) -> None:
        """Add a step's seconds by phase."""
        self._seconds += sum(phases[phase] for phase in OWN_PHASES)
        self._steps += 1

    def gather(self, step: int, memory: Mapping[str, int]) -> RanksRecord:
        """Return each rank's mean over the steps since the last call, and its memory.

        Collective over the world.
        """
        own = self._seconds / max(self._steps, 1)
        self._seconds, self._steps = 0.0, 0
        seconds, *kinds = self._mesh.gather_numbers([own, *memory.values()])
        held = {
            kind: [round(n) for n in of_rank] for kind, of_rank in zip(memory, kinds, strict=True)
        }
        return RanksRecord(step=step, own_seconds=seconds, memory_bytes=held)


def slow_rank(record: RanksRecord) -> str | None:
    """Return a word on the slowest rank, where it stands out; `None` where none does."""
    seconds = record.own_seconds
    slowest, usual = max(seconds), median_low(seconds)
    if len(seconds) < 2 or slowest <= SLOW * usual:
        return None
    rank = seconds.index(slowest)
    return (
        f"rank {rank} is slow: {slowest:.3f} s of work a step, {slowest / usual:.1f} times the "
        "median rank"
    )
