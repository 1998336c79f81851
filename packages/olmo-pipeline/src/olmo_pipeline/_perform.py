"""One pass of one rank over its actions: what is kept between a forward and its backward."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._exchange import Exchange
from ._leases import LeaseBook
from ._schedule import Action, Schedule
from ._split_backward import Splitter, Tape
from ._stage_result import StageFunction, unpack


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """What a pass leaves on one rank, without autograd history.

    Args:
        losses: On the rank of the last stage the loss of each microbatch, in order; else empty.
        auxiliaries: The auxiliary losses of this rank's stages by (stage, microbatch), where given.
        metrics: The metrics of this rank's stages by (stage, microbatch), where given: the tensors
            that the stage returned, not copies.
    """

    losses: list[Tensor]
    auxiliaries: dict[tuple[int, int], Tensor]
    metrics: dict[tuple[int, int], dict[str, Tensor]]


class _Saved(NamedTuple):
    hidden: Tensor | None  # the leaf that the stage read
    output: Tensor
    auxiliary: Tensor | None
    tape: Tape | None  # where a split backward leaves its weight gradients


class Pass:
    """Performs actions one by one.

    Args:
        schedule: For the number of stages.
        stages: The stage functions of this rank.
        microbatches: All microbatches, by index.
        shape_of: From a microbatch to the shape of its activation.
        dtype: Type of activations.
        splitter: Makes the tapes of split backwards.
        leases: Hands out the slots of live activations, if somebody wants to know.
        training: Keep what the backward needs.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, StageFunction],
        microbatches: Sequence[Any],
        shape_of: Callable[[Any], tuple[int, ...]],
        dtype: torch.dtype,
        splitter: Splitter,
        leases: LeaseBook | None,
        *,
        training: bool,
    ) -> None:
        self._last = schedule.num_stages - 1
        self._stages = stages
        self._microbatches = microbatches
        self._shape_of = shape_of
        self._dtype = dtype
        self._splitter = splitter
        self._leases = leases
        self._training = training
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._tapes: dict[tuple[int, int], Tape] = {}
        self._handed: dict[tuple[bool, int, int], Tensor] = {}  # by direction and who takes it in
        self._losses: dict[int, Tensor] = {}
        self._auxiliaries: dict[tuple[int, int], Tensor] = {}
        self._metrics: dict[tuple[int, int], dict[str, Tensor]] = {}

    def result(self) -> PipelineResult:
        """Return what the actions so far have left."""
        losses = [loss for _, loss in sorted(self._losses.items(), key=lambda item: item[0])]
        return PipelineResult(losses, dict(self._auxiliaries), dict(self._metrics))

    def perform(self, exchange: Exchange, position: int, action: Action) -> None:
        """Take the action's tensor in, compute, and hand the result on."""
        if self._leases is not None:
            self._leases.before(action)
        self._compute(exchange, position, action)
        if self._leases is not None:
            self._leases.after(action)

    def abandon(self) -> None:
        """Let go of what a failed pass holds."""
        if self._leases is not None:
            self._leases.release_all()
        self._saved.clear()
        self._tapes.clear()

    def _compute(self, exchange: Exchange, position: int, action: Action) -> None:
        if action.kind == "weight_gradient":
            self._tapes.pop((action.stage, action.microbatch)).compute()
            return
        is_forward = action.kind == "forward"
        taken = exchange.receive(position)
        if taken is None:
            taken = self._handed.pop((is_forward, action.stage, action.microbatch), None)
        if is_forward:
            made, following = self._forward(action, taken), action.stage + 1
        else:
            made, following = self._backward(action, taken), action.stage - 1
        if made is not None and not exchange.send(position, made):
            self._handed[is_forward, following, action.microbatch] = made

    def _forward(self, action: Action, hidden: Tensor | None) -> Tensor | None:
        microbatch = self._microbatches[action.microbatch]
        if hidden is not None:
            hidden.requires_grad_(self._training)
        tape = self._splitter.tape_for(action) if self._training else None
        with nullcontext() if tape is None else self._splitter.deferring(tape):
            returned = self._stages[action.stage](hidden, microbatch)
        output, auxiliary, metrics = unpack(action.stage, returned)
        is_last = action.stage == self._last
        self._check(action, output, auxiliary)
        key = (action.stage, action.microbatch)
        if auxiliary is not None:
            self._auxiliaries[key] = auxiliary.detach()
        if metrics is not None:
            self._metrics[key] = metrics
        if self._training:
            self._saved[key] = _Saved(hidden, output, auxiliary, tape)
        if is_last:
            self._losses[action.microbatch] = output.detach()
            return None
        return output.detach()

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        """Do a whole backward, or an input gradient, which leaves a tape."""
        saved = self._saved.pop((action.stage, action.microbatch))
        roots = [(saved.output, torch.ones_like(saved.output) if gradient is None else gradient)]
        if saved.auxiliary is not None:
            roots.append((saved.auxiliary, torch.ones_like(saved.auxiliary)))
        roots = [(tensor, seed) for tensor, seed in roots if tensor.requires_grad]
        if roots:  # the first stage may be frozen
            tensors, seeds = zip(*roots, strict=True)
            if saved.tape is None:
                torch.autograd.backward(tensors, seeds)
            else:
                self._splitter.backward(saved.tape, action, tensors, seeds)
        if saved.tape is not None:
            self._tapes[action.stage, action.microbatch] = saved.tape
        if saved.hidden is None:
            return None
        if saved.hidden.grad is None:
            return torch.zeros_like(saved.hidden)
        return saved.hidden.grad

    def _check(self, action: Action, output: Tensor, auxiliary: Tensor | None) -> None:
        stage = action.stage
        if auxiliary is not None and auxiliary.shape != ():
            raise ValueError(
                f"the auxiliary loss of stage {stage} must be a scalar, got shape "
                f"{tuple(auxiliary.shape)}."
            )
        if stage == self._last:
            if output.shape != ():
                raise ValueError(
                    f"the last stage must return a scalar loss, got shape {tuple(output.shape)}."
                )
        else:
            shape = self._shape_of(self._microbatches[action.microbatch])
            if tuple(output.shape) != shape or output.dtype != self._dtype:
                raise ValueError(
                    f"stage {stage} must return an activation of shape {shape} and {self._dtype}, "
                    f"as `activation_shape` and `dtype` say, got {tuple(output.shape)} and "
                    f"{output.dtype}."
                )
        may_be_frozen = stage == 0 and stage != self._last
        if self._training and not output.requires_grad and not may_be_frozen:
            raise ValueError(
                f"the output of stage {stage} must depend on its input and carry gradients, got a "
                f"tensor without; was it detached?"
            )
