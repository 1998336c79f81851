"""Leases: which buffers belong to which activation, for as long as its backward may need them.

A stage that writes into buffers of its own (a dispatch buffer, a static output of a CUDA graph) may
not use one again before the backward of the microbatch that wrote it has ended: in an interleaved
schedule several forwards lie between, and the values would change under the backward without an
error. The schedule says how many are needed at most, `max_live_per_stage`, and the executor says
which one is free: it numbers the live activations of each stage by the lowest free slot.
"""

import heapq
from typing import Protocol

from ._schedule import Action, Schedule


class LeaseHooks(Protocol):
    """What the executor calls when activations come to life and die, on this rank, in its order.

    Both calls are made by the host while it issues the work of the stage, so on CUDA a buffer may
    be used again by whatever is issued later on the same stream. What a stage returns must not lie
    in a leased buffer: in `evaluate` it may still be on its way when the slot is free again.
    """

    def acquire(self, stage: int, microbatch: int, slot: int) -> None:
        """Take slot `slot`, in [0, max_live_per_stage[stage]): the forward is about to run."""
        ...

    def release(self, stage: int, microbatch: int, slot: int) -> None:
        """Give it back: the backward (the weight gradient, if split) has ended, or the pass has."""
        ...


class LeaseBook:
    """Keeps the slots of one pass.

    Args:
        schedule: For the number of slots of each stage.
        hooks: Whom to tell.
        training: False if no backward follows: then each forward gives back its slot.
    """

    def __init__(self, schedule: Schedule, hooks: LeaseHooks, *, training: bool) -> None:
        self._hooks = hooks
        self._training = training
        self._held: dict[tuple[int, int], int] = {}
        self._free = {
            stage: list(range(count)) for stage, count in enumerate(schedule.max_live_per_stage)
        }

    def before(self, action: Action) -> None:
        """Take a slot if `action` is a forward."""
        if action.kind == "forward":
            slot = heapq.heappop(self._free[action.stage])
            self._held[action.stage, action.microbatch] = slot
            self._hooks.acquire(action.stage, action.microbatch, slot)

    def after(self, action: Action) -> None:
        """Give the slot back if `action` is the last one to use the activation."""
        last_kinds = ("backward", "weight_gradient") if self._training else ("forward",)
        if action.kind in last_kinds:
            self._release(action.stage, action.microbatch)

    def release_all(self) -> None:
        """Give back what a failed pass holds."""
        for stage, microbatch in list(self._held):
            self._release(stage, microbatch)

    def _release(self, stage: int, microbatch: int) -> None:
        slot = self._held.pop((stage, microbatch))
        heapq.heappush(self._free[stage], slot)
        self._hooks.release(stage, microbatch, slot)
