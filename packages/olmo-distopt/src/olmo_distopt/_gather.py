"""Parameters put together from the ranges that their replicas have updated, coalesced.

Each replica has written its own range into its copy of the parameter. A gather sends the ranges of
many parameters of one group and dtype as one line, padded to the longest replica's:

    rank r sends    | own range of p0 | own range of p1 | ... | padding |

A parameter that travels alone in equal ranges is received in place, else into a staging line, from
which the ranges of the others are copied. A gather runs while the device does something else,
between `launch` and `finish`; until then the parameters must not be read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ._bucket_order import fill_buckets
from ._collective import start_gather
from ._tensor_state import TensorState


class Gather:
    """One all-gather of cut parameters of one group, device and dtype."""

    def __init__(self, states: Sequence[TensorState]) -> None:
        self.states = states
        self.parameters: set[nn.Parameter] = {state.parameter for state in states}
        self._group = states[0].group
        lengths = [
            [state.ranges[rank].length for state in states if state.ranges is not None]
            for rank in range(self._group.size)
        ]
        self._length = max(sum(each) for each in lengths)
        self._equal = all(each == lengths[0] for each in lengths)
        self._received: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def launch(self) -> None:
        """Start the all-gather of what the replicas have written into their own ranges."""
        like = self.states[0].parameter
        size, own = self._group.size, [state.slice_of(state.parameter) for state in self.states]
        sent = torch.cat(own)
        if sent.numel() < self._length:
            sent = torch.cat([sent, sent.new_zeros(self._length - sent.numel())])
        if self._equal and len(self.states) == 1:
            line = like.detach().view(-1)
        else:
            line = torch.empty(size * self._length, dtype=like.dtype, device=like.device)
            self._received = line.view(size, -1)
        self._sent = sent
        # As bytes: a gather needs no arithmetic, and not every backend knows every dtype.
        assert self._group.process_group is not None, "a cut parameter has other replicas"
        self._work = start_gather(
            line.view(torch.uint8), sent.view(torch.uint8), self._group.process_group
        )

    def finish(self) -> None:
        """Make the current stream wait for the all-gather; the parameters are then whole."""
        if self._work is None:
            return
        self._work.wait()
        if self._received is not None:
            self._write(self._received)
        self._work = self._received = self._sent = None

    def _write(self, received: torch.Tensor) -> None:
        wholes = [state.parameter.detach().view(-1) for state in self.states]
        if self._equal:
            pieces = received.split([state.own.length for state in self.states], dim=1)
            wholes = [whole.view(self._group.size, -1) for whole in wholes]
            torch._foreach_copy_(wholes, list(pieces))
            return
        for rank, line in enumerate(received):
            ranges = [state.ranges[rank] for state in self.states if state.ranges is not None]
            lengths = [held.length for held in ranges]
            pieces = line.narrow(0, 0, sum(lengths)).split(lengths)
            into = [whole.narrow(0, *held) for whole, held in zip(wholes, ranges, strict=True)]
            torch._foreach_copy_(into, list(pieces))


def plan_gathers(states: Sequence[TensorState], bucket_bytes: int) -> list[Gather]:
    """Return the gathers of all cut parameters, as their dtypes are now, in order of launch."""
    buckets = fill_buckets(
        (state for state in states if state.ranges is not None),
        key=lambda state: (
            state.group.name,
            str(state.parameter.device),
            str(state.parameter.dtype),
        ),
        num_bytes=lambda state: state.parameter.numel() * state.parameter.element_size(),
        limit=bucket_bytes,
    )
    return [Gather(bucket) for bucket in buckets]
