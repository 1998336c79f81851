"""One parameter in several stages, such as an embedding that is the head as well.

Each rank that holds it has its own copy, and each backward adds to the copy it used. The gradient
of the shared parameter is the sum, which every copy must get before anything reads or shards it
(reduction over data replicas, norm, clipping, optimizer): then equal copies stay equal bit for bit.
Stages of one rank share one `nn.Parameter`, whose `.grad` is the sum already.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._agreement import gather_texts, refusing_together
from ._channels import Channel, open_channels
from ._ranks import rank_in
from ._schedule import Schedule


class TiedParameter:
    """Sums the gradients of the copies of one parameter.

    All ranks of the pipeline build it together; those that hold no copy take no further part.

    Args:
        schedule: Says which rank holds which stage.
        copies: The parameter of each stage of this rank that uses it; one object for all.
        stages: All stages that use it, the same on every rank; None for the first and the last.
        group: The ranks of the pipeline in pipeline order, as for `PipelineExecutor`.
        device: Where the parameter lives: CPU or this rank's CUDA device.
        timeout: How long a transfer may wait for its peer.

    Raises:
        ValueError: If `copies` are not those of this rank's stages, two stages of this rank have
            different parameters, `stages` are not of the schedule, or ranks bring different shapes,
            dtypes or stages. What one rank refuses is refused by all.
        RuntimeError: If several ranks are asked for and torch.distributed is not initialised.
    """

    def __init__(
        self,
        schedule: Schedule,
        copies: Mapping[int, nn.Parameter],
        *,
        stages: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        with refusing_together(group, alone=schedule.num_ranks == 1):
            rank = rank_in(group, schedule.num_ranks)
            tied = sorted({0, schedule.num_stages - 1} if stages is None else set(stages))
            if not tied or not 0 <= tied[0] <= tied[-1] < schedule.num_stages:
                raise ValueError(
                    f"`stages` must be some of the stages 0 to {schedule.num_stages - 1}, got "
                    f"{tied}."
                )
            held = [stage for stage in tied if stage in schedule.stages_of(rank)]
            if sorted(copies) != held:
                raise ValueError(
                    f"`copies` of rank {rank} must be those of stages {held}, got {sorted(copies)}."
                )
            if len({id(parameter) for parameter in copies.values()}) > 1:
                raise ValueError(
                    f"stages {held} of rank {rank} must share one parameter, got different ones; "
                    f"give the later stage the `nn.Parameter` of the first."
                )
        self._parameter = next(iter(copies.values()), None)
        self._rank = rank
        self._holders = sorted({schedule.rank_of_stage[stage] for stage in tied})
        self._channels: dict[tuple[int, int], Channel] = {}
        if len(self._holders) > 1:
            self._channels = self._open(tied, group, torch.device(device), timeout)

    @property
    def is_owner(self) -> bool:
        """Whether this rank counts the parameter in norms and writes it into checkpoints."""
        return self._rank == self._holders[0]

    def sum_gradients(self) -> None:
        """Give every copy the sum of the gradients of all copies; None counts as zero.

        Every rank that holds a copy calls it once a step, after the last `run` and before the
        gradient is read, reduced over data replicas or sharded.
        """
        parameter = self._parameter
        if parameter is None or not self._channels:
            return
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        own = own.contiguous()
        others = [holder for holder in self._holders if holder != self._rank]
        parts: dict[int, Tensor] = {self._rank: own}
        works = []
        for other in others:
            parts[other] = torch.empty_like(own)
            works.append(self._channels[self._rank, other].send(own))
            works.append(self._channels[other, self._rank].receive(parts[other]))
        for work in works:
            work.wait()
        total = parts[self._holders[0]].clone()
        for holder in self._holders[1:]:  # one order everywhere: bitwise the same sum
            total += parts[holder]
        if parameter.grad is None:
            parameter.grad = total
        else:
            parameter.grad.copy_(total)

    def close(self) -> None:
        """End the communicators."""
        for channel in self._channels.values():
            channel.close()
        self._channels = {}

    def _open(
        self,
        tied: list[int],
        group: dist.ProcessGroup | None,
        device: torch.device,
        timeout: timedelta,
    ) -> dict[tuple[int, int], Channel]:
        mine = ""
        if self._parameter is not None:
            mine = f"{tuple(self._parameter.shape)}, {self._parameter.dtype}"
        kinds = set(gather_texts(group, mine)) - {""}
        if len(kinds) > 1:
            raise ValueError(
                f"all copies of a tied parameter must have one shape and dtype, got "
                f"{sorted(kinds)}."
            )
        return open_channels(
            [(a, b) for a in self._holders for b in self._holders if a != b],
            group=group,
            agreement=f"tied stages: {tied}",
            device=device,
            timeout=timeout,
        )
