"""What is sent ahead of the messages of a pass, so that both ends mean the same pass.

Sender and receiver work out for themselves what comes in which shape. Where they disagree, because
one evaluates one microbatch less or has another `activation_shape`, gloo ends the process when a
message is too long, and when it is too short the rest stays as it was allocated: any numbers at
all. So the first message of every pass on a channel says what the pass is. On CUDA nothing is sent
ahead, as the host would have to wait for it.
"""

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor


class Announcement(NamedTuple):
    """One pass as one rank sees it."""

    training: int  # 1 in `run`, 0 in `evaluate`
    num_microbatches: int  # of the call
    first: int  # microbatch of this pass
    shapes: int  # checksum of the activations' shapes

    @classmethod
    def of(
        cls, *, training: bool, num_microbatches: int, first: int, shapes: Sequence[tuple[int, ...]]
    ) -> "Announcement":
        """Make one from the shapes of all activations of the pass, by microbatch."""
        return cls(int(training), num_microbatches, first, crc32(repr(list(shapes)).encode()))

    def to_tensor(self) -> Tensor:
        """Return four int64 on the CPU."""
        return torch.tensor(self, dtype=torch.int64)

    def check(self, received: Tensor, source: int) -> None:
        """Raise unless rank `source` means this pass.

        Raises:
            ValueError: If it does not.
        """
        other = Announcement(*map(int, received.tolist()))
        if other == self:
            return
        if other[:3] == self[:3]:
            raise ValueError(
                f"all ranks must give the same `activation_shape` for the same microbatches, but "
                f"rank {source} has other shapes than this rank."
            )
        raise ValueError(
            f"all ranks must make the same calls with the same microbatches, but rank {source} is "
            f"in {other._name()} and this rank in {self._name()}."
        )

    def _name(self) -> str:
        call = "run" if self.training else "evaluate"
        return f"`{call}` of {self.num_microbatches} microbatches, from microbatch {self.first} on"
