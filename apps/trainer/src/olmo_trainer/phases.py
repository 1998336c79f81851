"""Where the time of a step goes: one clock for the phases, which also beats for the watchdog.

    data      the rank's share of the batch, read and moved to the device
    wait      until the other data ranks have theirs: the batch's tokens are counted together
    forward   the stages' forwards, collectives of expert ranks included
    backward  the rest of the pipeline's pass: backwards, recompute, transfers, bubbles
    reduce    gradients and statistics over the ranks, as far as nothing else hid it
    step      norm, clipping, biases, optimizer, and the copy of the step's numbers to the host

On a GPU the times are those of its stream, from events that are read together once the last of them
has passed, so that no phase waits for the host's sake.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

PHASES = ("data", "wait", "forward", "backward", "reduce", "step")


@dataclass(frozen=True)
class StepMarks:
    """When a step's phases began, and when it ended; on a GPU, when its stream comes there.

    Attributes:
        begins: Each phase with its beginning, in order: a time, or an event of the stream.
        end: Of the last one.
    """

    begins: Sequence[tuple[str, Any]]
    end: Any

    def wait(self) -> None:
        """Return when the device has come to the end."""
        if isinstance(self.end, torch.cuda.Event):
            self.end.synchronize()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase, in the order of `PHASES`; `wait` comes first."""
        seconds = dict.fromkeys(PHASES, 0.0)
        ends = [mark for _, mark in self.begins[1:]] + [self.end]
        for (phase, start), stop in zip(self.begins, ends, strict=True):
            seconds[phase] += (
                start.elapsed_time(stop) / 1000
                if isinstance(start, torch.cuda.Event)
                else stop - start
            )
        return seconds


class PhaseClock:
    """Times the phases of a step.

    Args:
        device: Whose time.
        pulse: Called with the phase at each change; the first argument of `begin` comes with it.
        stages: Modules whose forward is the phase `forward`, and what follows it `backward`.
    """

    def __init__(
        self, device: torch.device, pulse: Callable[[int, str], None], stages: Iterable[nn.Module]
    ) -> None:
        self._on_gpu = device.type == "cuda"
        self._pulse = pulse
        self._step = 0
        self._timing = False
        self._marks: list[tuple[str, Any]] = []
        for stage in stages:
            stage.register_forward_pre_hook(lambda *_: self.enter("forward"))
            stage.register_forward_hook(lambda *_: self.enter("backward"))

    def begin(self, step: int) -> None:
        """Start a step, with its data."""
        self._step, self._timing, self._marks = step, True, []
        self.enter("data")

    def enter(self, phase: str) -> None:
        """Leave the phase in hand for `phase`. Between steps it only beats."""
        self._pulse(self._step, phase if self._timing else "evaluate")
        if self._timing:
            self._marks.append((phase, self._now()))

    def end(self) -> StepMarks:
        """End the step; on a GPU its stream may be far from there."""
        marks = StepMarks(self._marks, self._now())
        self._timing, self._marks = False, []
        return marks

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
