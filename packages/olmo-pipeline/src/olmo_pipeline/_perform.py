"""One pass of one rank over its actions: what is kept between a forward and its backward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._exchange import Exchange
from ._schedule import Action, Schedule

StageFunction = Callable[[Tensor | None, Any], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """What a pass leaves on one rank, without autograd history.

    Args:
        losses: On the rank of the last stage the loss of each microbatch, in order; else empty.
        auxiliaries: The auxiliary losses of this rank's stages by (stage, microbatch), where given.
    """

    losses: list[Tensor]
    auxiliaries: dict[tuple[int, int], Tensor]


class _Saved(NamedTuple):
    hidden: Tensor | None  # the leaf that the stage read
    output: Tensor
    auxiliary: Tensor | None


class Pass:
    """Performs actions one by one.

    Args:
        schedule: For the number of stages.
        stages: The stage functions of this rank.
        microbatches: All microbatches, by index.
        shape_of: From a microbatch to the shape of its activation.
        dtype: Type of activations.
        training: Keep what the backward needs.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, StageFunction],
        microbatches: Sequence[Any],
        shape_of: Callable[[Any], tuple[int, ...]],
        dtype: torch.dtype,
        *,
        training: bool,
    ) -> None:
        self._last = schedule.num_stages - 1
        self._stages = stages
        self._microbatches = microbatches
        self._shape_of = shape_of
        self._dtype = dtype
        self._training = training
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._handed: dict[Action, Tensor] = {}  # by the action of this rank that takes it in
        self._losses: dict[int, Tensor] = {}
        self._auxiliaries: dict[tuple[int, int], Tensor] = {}

    def result(self) -> PipelineResult:
        """Return what the actions so far have left."""
        losses = [loss for _, loss in sorted(self._losses.items(), key=lambda item: item[0])]
        return PipelineResult(losses, dict(self._auxiliaries))

    def perform(self, exchange: Exchange, position: int, action: Action) -> None:
        """Take the action's tensor in, compute, and hand the result on."""
        taken = exchange.receive(position)
        if taken is None:
            taken = self._handed.pop(action, None)
        if action.kind == "forward":
            made, following = self._forward(action, taken), action.stage + 1
        else:
            made, following = self._backward(action, taken), action.stage - 1
        if made is not None and not exchange.send(position, made):
            self._handed[Action(action.kind, following, action.microbatch)] = made

    def _forward(self, action: Action, hidden: Tensor | None) -> Tensor | None:
        microbatch = self._microbatches[action.microbatch]
        if hidden is not None:
            hidden.requires_grad_(self._training)
        output, auxiliary = self._stages[action.stage](hidden, microbatch)
        is_last = action.stage == self._last
        self._check(action, output, auxiliary)
        key = (action.stage, action.microbatch)
        if auxiliary is not None:
            self._auxiliaries[key] = auxiliary.detach()
        if self._training:
            self._saved[key] = _Saved(hidden, output, auxiliary)
        if is_last:
            self._losses[action.microbatch] = output.detach()
            return None
        return output.detach()

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        saved = self._saved.pop((action.stage, action.microbatch))
        roots = [(saved.output, torch.ones_like(saved.output) if gradient is None else gradient)]
        if saved.auxiliary is not None:
            roots.append((saved.auxiliary, torch.ones_like(saved.auxiliary)))
        roots = [(tensor, seed) for tensor, seed in roots if tensor.requires_grad]
        if roots:  # the first stage may be frozen
            torch.autograd.backward([tensor for tensor, _ in roots], [seed for _, seed in roots])
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
