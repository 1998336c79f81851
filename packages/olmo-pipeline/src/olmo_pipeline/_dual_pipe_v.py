"""DualPipeV, the V form of DualPipe: a forward of one chunk beside a backward of the other.

Rank r of P holds stages r (chunk 0) and 2 P - 1 - r (chunk 1). In the steady state it works on a
forward of one chunk and a backward of the other in turn, so that a runtime may run the two at the
same time and hide the communication of one behind the computation of the other. Here the pair
stands as two neighbouring actions, forward first.

    part                                          times on rank r
    1  forward 0                                  2 (P - 1 - r)
    2  forward 0, forward 1                       r + 1
    3  backward 1 split at once, forward 1        P - 1 - r
    4  forward 0, backward 1, forward 1, backward 0    m - 2 P + r + 1
    5  backward 1, forward 1, backward 0          P - 1 - r
    6  backward 1, backward 0                     r + 1, the last r + 1 backwards split
    7  weight gradient, input gradient 0          P - 1 - r
    8  weight gradients that are left             r + 1

Published idle time, with F forward, B = I + W whole backward and a pair F&B as long as it takes
(F + B when nothing overlaps): `(P - 1) ( F&B + B - 3 W )`; published activations a rank: 2 P + 1.

Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1 and table 2; README of
github.com/deepseek-ai/DualPipe, "DualPipeV"; P. Qi et al., "DualPipe could be better without the
Dual", 2025 (the cut in half).
"""

from ._placement import at_least_one, place_stages
from ._schedule import Action, Schedule


def dual_pipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build DualPipeV.

    The parts need m >= 2 P. With fewer microbatches the order is that of 2 P without those that do
    not exist, which stays legal since microbatches never wait for each other.

    Args:
        num_ranks: Ranks P, at least 1; there are 2 P stages, stage s on rank `min(s, 2 P - 1 - s)`.
        num_microbatches: Microbatches m, at least 1.

    Returns:
        A schedule with some backwards split, which validates under eager sends.

    Raises:
        ValueError: If an argument is below 1.
    """
    at_least_one(num_ranks=num_ranks, num_microbatches=num_microbatches)
    rows = [
        _row(num_ranks, rank, max(num_microbatches, 2 * num_ranks)) for rank in range(num_ranks)
    ]
    return Schedule(
        num_ranks=num_ranks,
        num_stages=2 * num_ranks,
        num_microbatches=num_microbatches,
        actions=tuple(
            tuple(action for action in row if action.microbatch < num_microbatches) for row in rows
        ),
        rank_of_stage=place_stages(num_ranks, 2, "v"),
        name="dual_pipe_v",
    )


class _Writer:
    """Writes the row of one rank; counts which microbatch of which chunk comes next."""

    def __init__(self, num_ranks: int, rank: int) -> None:
        self._stages = (rank, 2 * num_ranks - 1 - rank)
        self._forwards, self._backwards = [0, 0], [0, 0]
        self._deferred: list[Action] = []
        self.row: list[Action] = []

    def forward(self, chunk: int) -> None:
        self.row.append(Action("forward", self._stages[chunk], self._forwards[chunk]))
        self._forwards[chunk] += 1

    def backward(self, chunk: int, *, split: bool = False) -> None:
        stage, index = self._stages[chunk], self._backwards[chunk]
        self._backwards[chunk] += 1
        self.row.append(Action("input_gradient" if split else "backward", stage, index))
        if split:
            self._deferred.append(Action("weight_gradient", stage, index))

    def weight_gradient(self) -> None:
        self.row.append(self._deferred.pop(0))


def _row(num_ranks: int, rank: int, num_microbatches: int) -> list[Action]:
    write, beyond = _Writer(num_ranks, rank), num_ranks - 1 - rank
    for _ in range(2 * beyond):
        write.forward(0)
    for _ in range(rank + 1):
        write.forward(0)
        write.forward(1)
    for _ in range(beyond):
        write.backward(1, split=True)
        write.weight_gradient()
        write.forward(1)
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        write.forward(0)
        write.backward(1)
        write.forward(1)
        write.backward(0)
    for _ in range(beyond):
        write.backward(1)
        write.forward(1)
        write.backward(0)
    for number in range(2 * (rank + 1)):
        write.backward(1 - number % 2, split=number >= rank + 1)
    for _ in range(beyond):
        write.weight_gradient()
        write.backward(0, split=True)
    for _ in range(rank + 1):
        write.weight_gradient()
    return write.row
