"""One flat line of gradients of one replica group, and its reduction.

An all-reduce sums the line in place. A reduce-scatter gives each of the `D` replicas the sum of its
own range of every tensor, for half the traffic. Its input must hold the ranges of replica 0, then
those of replica 1, and so on, while a kernel that adds to `main_grad` wants each tensor in one
piece; so a bucket of several tensors is packed for the journey (a copy of the bucket until the
reduction ends), and a bucket of one tensor travels as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ._collective import start_scatter
from ._groups import ReplicaGroup
from ._partition import Range


class GradientBucket:
    """A line of `main_grad`s with one reduction a window.

    Args:
        group: the replica group of all members.
        parameters: each gets its view of the line as `main_grad`.
        ranges: by parameter, what this replica receives of a reduce-scatter. None: all-reduce.
        dtype: of the line.

    Attributes:
        num_awaited: parameters whose last gradient of the window has not arrived.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        parameters: Sequence[nn.Parameter],
        ranges: Sequence[Range] | None,
        dtype: torch.dtype,
    ) -> None:
        self.group = group
        self.parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=parameters[0].device)
        self._lines = self.flat.split(sizes)
        self._ranges = ranges
        self._received: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None
        self._work: dist.Work | None = None
        self._streams: set[torch.cuda.Stream] = set()
        self.num_awaited = len(parameters)
        for index, (parameter, line) in enumerate(zip(parameters, self._lines, strict=True)):
            vars(parameter)["main_grad"] = line.view_as(parameter)
            if ranges is not None:
                vars(parameter)["main_grad_range"] = ranges[index]

    @property
    def scatters(self) -> bool:
        """Whether the reduction is a reduce-scatter, which holds memory while it runs."""
        return self._ranges is not None

    def zero(self) -> None:
        """Clear the line, scratch included, for the next window."""
        self.flat.zero_()
        self.num_awaited = len(self.parameters)

    def note_stream(self) -> None:
        """Remember that the current stream has added to the line."""
        if self.flat.is_cuda:
            self._streams.add(torch.cuda.current_stream(self.flat.device))

    def launch(self) -> None:
        """Start the reduction, after whatever the streams that added to the line have queued."""
        if self._streams:
            here = torch.cuda.current_stream(self.flat.device)
            for stream in self._streams - {here}:
                here.wait_stream(stream)
            self._streams.clear()
        size, process_group = self.group.size, self.group.process_group
        if process_group is None or size == 1 or self.flat.numel() == 0:
            return
        if self._ranges is None:
            self._work = dist.all_reduce(self.flat, group=process_group, async_op=True)
            return
        if len(self._lines) == 1:
            self._sent = self.flat
        else:
            self._sent = torch.cat([line.view(size, -1) for line in self._lines], dim=1).view(-1)
        self._received = self.flat.new_empty(self.flat.numel() // size)
        self._work = start_scatter(self._received, self._sent, process_group)

    def finish(self) -> None:
        """Make the current stream wait for the reduction; the sums are then in the line."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if self._received is not None:
            own = self._own_lines()
            torch._foreach_copy_(own, list(self._received.split([line.numel() for line in own])))
            self._received = self._sent = None

    def divide(self, divisor: torch.Tensor) -> None:
        """Divide the sums by a 0-d tensor of any device and dtype."""
        divisor = divisor.to(self.flat.device, self.flat.dtype)
        torch._foreach_div_([self.flat] if self._ranges is None else self._own_lines(), divisor)

    def _own_lines(self) -> list[torch.Tensor]:
        ranges = self._ranges or []
        return [line.narrow(0, *own) for line, own in zip(self._lines, ranges, strict=True)]
