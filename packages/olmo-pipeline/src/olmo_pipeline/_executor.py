"""Run a schedule: each rank performs its list of actions on its stages.

A forward calls the stage function on a leaf tensor, keeps the output until the backward of the same
microbatch, and hands it, detached, to the next stage. A backward of stage s computes

    torch.autograd.backward([output, auxiliary], [gradient from stage s + 1, 1])

(for the last stage `output` is the loss and its gradient 1), adds to the `.grad` of the parameters
and hands the gradient of the leaf to stage s - 1. An auxiliary loss (balance, z-loss) thus acts in
its own stage, wherever that is. An input gradient action is a backward without the weight gradients
of linear operations, which are left for its weight gradient action. The executor scales nothing:
gradients are those of the plain sum over microbatches of loss and auxiliary losses, and add up over
calls until the caller clears them.

Tensors pass within a rank without communication and between ranks over one communicator per
direction (gloo for CPU, NCCL for CUDA).
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ._agreement import refusing_together
from ._announcement import Announcement
from ._channels import Channel, open_channels
from ._exchange import Exchange
from ._leases import LeaseBook
from ._leases import LeaseHooks as LeaseHooks
from ._message_plan import Rows, forward_rows, list_channels
from ._perform import Pass
from ._perform import PipelineResult as PipelineResult
from ._ranks import rank_in
from ._schedule import Schedule
from ._split_backward import Compute, Splitter
from ._split_rules import SplitRule as SplitRule
from ._stage_result import StageFunction as StageFunction
from ._validate import validate

Shape = Sequence[int] | Callable[[Any], Sequence[int]]


class PipelineExecutor:
    """Performs one rank's part of a schedule.

    All ranks of the pipeline build their executors together, and call `run` and `evaluate` in the
    same order with the same microbatches. With one rank torch.distributed need not be initialised.

    Args:
        schedule: What to run, the same on every rank.
        stages: The function of each stage that this rank holds, by global stage index. It is called
            with the hidden input (None for stage 0, else a leaf tensor that requires grad in `run`)
            and the microbatch, and returns the activation for the next stage (for the last stage
            the scalar loss), a scalar auxiliary loss or None and, if it has any, a dict of metrics:
            tensors of any shape and device that carry no gradients.
        group: The ranks of the pipeline in pipeline order; None for all processes. Several
            pipelines (data replicas) may exist side by side.
        device: Where activations live: CPU or this rank's CUDA device.
        dtype: Floating type of activations and of their gradients between stages.
        timeout: How long a send or receive may wait for its peer.
        split_rules: Where the schedule splits backwards: how those of operations besides torch's
            linear ones split, by the torch function or operator that the stage calls (such as
            `torch.ops.my_library.grouped_mm.default`); None for one that stays whole on purpose and
            needs no warning. Layers with a backward of their own ask `defer` instead.
        leases: Told when activations come to life and die, for stages that write into buffers of
            their own.

    Raises:
        ValueError: If the schedule is not valid, `stages` are not those of
            this rank, the group has another size than the schedule, `device` is neither CPU nor
            CUDA, `dtype` is not a floating type, or ranks bring different schedules. What one rank
            refuses is refused by all.
        TypeError: If an argument is of another kind.
        RuntimeError: If several ranks are asked for and torch.distributed is not initialised.

    Note:
        A rank keeps the graph and output of a microbatch from its forward to its backward, what
        `simulate(schedule).peak_live_per_rank` counts; a sent gradient until a later message proves
        its arrival, at most to the end of the call.

        On CUDA a transfer is a kernel that spins until its peer takes part, while CUDA may hold
        back what loads a kernel for the first time. Receives are therefore posted when their action
        comes up, and a process that interleaves stages should load all kernels at its start
        (`CUDA_MODULE_LOADING=EAGER` before the first CUDA call).
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, StageFunction],
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str,
        dtype: torch.dtype,
        timeout: timedelta = timedelta(minutes=10),
        split_rules: Mapping[Callable[..., Any], SplitRule | None] | None = None,
        leases: LeaseHooks | None = None,
    ) -> None:
        with refusing_together(group, alone=getattr(schedule, "num_ranks", 0) == 1):
            _check_kinds(schedule, stages, dtype, timeout, split_rules)
            validate(schedule)
            self._schedule = schedule
            self._device = torch.device(device)
            self._dtype = dtype
            self._leases = leases
            self._failure: str | None = None
            self._rank = rank_in(group, schedule.num_ranks)
            self._stages = dict(stages)
            self._splitter = Splitter(schedule, split_rules or {}, self._stages)
            self._check_arguments()
        self._channels: dict[tuple[int, int], Channel] = {}
        if schedule.num_ranks > 1:
            self._channels = open_channels(
                list_channels(schedule.rank_of_stage),
                group=group,
                agreement=f"{schedule}dtype: {dtype}",
                device=self._device,
                timeout=timeout,
            )

    def _check_arguments(self) -> None:
        if self._device.type not in ("cpu", "cuda"):
            raise ValueError(f"`device` must be a CPU or CUDA device, got {self._device}.")
        if not self._dtype.is_floating_point:
            raise ValueError(f"`dtype` must be a floating type, got {self._dtype}.")
        held = self._schedule.stages_of(self._rank)
        if tuple(sorted(self._stages)) != held:
            raise ValueError(
                f"`stages` of rank {self._rank} must be {list(held)}, got {sorted(self._stages)}."
            )

    def run(self, microbatches: Sequence[Any], *, activation_shape: Shape) -> PipelineResult:
        """Forward and backward of one batch; gradients are added to `.grad`.

        Args:
            microbatches: `schedule.num_microbatches` objects of any kind, the same on every rank.
            activation_shape: Shape of the activations between stages: one for all microbatches, or
                a function of the microbatch. It may differ from call to call.

        Returns:
            The losses (on the rank of the last stage), auxiliary losses and metrics of this rank,
            detached.

        Raises:
            ValueError: If the number of microbatches is not the schedule's; of several ranks this
                one has then failed, so that no other waits for it.
            RuntimeError: If an action fails (the message names it), or one has failed before.
        """
        if len(microbatches) != self._schedule.num_microbatches:
            if self._channels:
                self._fail("before its first action")
            raise ValueError(
                f"`microbatches` must hold {self._schedule.num_microbatches}, as many as the "
                f"schedule has, got {len(microbatches)}."
            )
        work = self._new_pass(microbatches, activation_shape, training=True)
        with torch.enable_grad():
            rows = self._schedule.actions
            self._perform(work, rows, microbatches, activation_shape, training=True)
        return work.result()

    def evaluate(self, microbatches: Sequence[Any], *, activation_shape: Shape) -> PipelineResult:
        """Forward only, without gradients; stage functions get inputs that do not require grad.

        Args:
            microbatches: Any number of objects, the same on every rank.
            activation_shape: As for `run`.

        Returns:
            The losses (on the rank of the last stage), auxiliary losses and metrics of this rank.

        Raises:
            RuntimeError: If an action fails (the message names it), or one has failed before.
        """
        work = self._new_pass(microbatches, activation_shape, training=False)
        num_ranks = self._schedule.num_ranks
        with torch.no_grad():
            # Nothing comes back that would prove an arrival, so each round waits for its own sends.
            for first in range(0, len(microbatches), num_ranks):
                indices = range(first, min(first + num_ranks, len(microbatches)))
                rows = forward_rows(self._schedule.rank_of_stage, num_ranks, indices)
                self._perform(work, rows, microbatches, activation_shape, training=False)
        return work.result()

    def defer(self, weights: tuple[nn.Parameter, ...]) -> Callable[[Compute], None] | None:
        """Say whether the weight gradients of a layer's call may wait for a `W`, and take them in.

        For layers whose backward is their own (quantised, fused): pass them `executor.defer`, also
        before the first `run`. A layer asks in its forward, once a call, whose answer holds for the
        backward of that call:

            later = executor.defer((weight,))

        None: as always; the weights are inputs of the layer's autograd function, and its backward
        returns their gradients. Else the function gets `weight.detach()`, so that no hook of the
        weight runs before its gradient is there, and its backward calls `later(compute)`, once.
        `compute()` runs at the weight gradient action, without autograd, and returns one gradient a
        weight, or None for one that was added elsewhere; what it holds on to is freed then. Several
        uses of a weight, by layers that ask and by torch's own operations, are summed before they
        are added to `.grad`.

        Args:
            weights: The parameters that require gradients, themselves and not views or casts.

        Returns:
            None in an evaluation, outside of `run`, and where the schedule leaves this backward
            whole; else a function that takes `compute`. It holds for a forward that is run again in
            the backward, too. It raises `RuntimeError` in a backward that the stage itself runs
            inside its forward.

        Raises:
            TypeError: `weights` is no tuple of parameters.
        """
        if not isinstance(weights, tuple) or not all(isinstance(w, nn.Parameter) for w in weights):
            raise TypeError("`weights` must be a tuple of `nn.Parameter`, as `(layer.weight,)` is.")
        return self._splitter.defer(weights)

    def close(self) -> None:
        """End the communicators after what is under way; a later `run` or `evaluate` raises."""
        self._failure = self._failure or "it was closed"
        for channel in self._channels.values():
            channel.close()
        self._channels = {}

    def _new_pass(
        self, microbatches: Sequence[Any], activation_shape: Shape, *, training: bool
    ) -> Pass:
        if self._failure is not None:
            raise RuntimeError(
                f"this executor cannot run any more, {self._failure}; "
                f"build a new one on every rank."
            )
        return Pass(
            self._schedule,
            self._stages,
            microbatches,
            lambda microbatch: _shape(activation_shape, microbatch),
            self._dtype,
            self._splitter,
            None
            if self._leases is None
            else LeaseBook(self._schedule, self._leases, training=training),
            training=training,
        )

    def _perform(
        self,
        work: Pass,
        rows: Rows,
        microbatches: Sequence[Any],
        activation_shape: Shape,
        *,
        training: bool,
    ) -> None:
        doing = "before its first action"
        try:
            exchange = Exchange(
                self._channels,
                rows,
                self._schedule.rank_of_stage,
                rank=self._rank,
                allocate=lambda index: torch.empty(
                    _shape(activation_shape, microbatches[index]),
                    device=self._device,
                    dtype=self._dtype,
                ),
                announcement=self._announcement(
                    rows, microbatches, activation_shape, training=training
                ),
            )
            for position, action in enumerate(rows[self._rank]):
                doing = (
                    f"at {action}, the {action.kind} of stage {action.stage} on microbatch "
                    f"{action.microbatch}"
                )
                work.perform(exchange, position, action)
            doing = "at the end, in waiting for its sends"
            exchange.finish()
        except BaseException as error:
            work.abandon()
            self._fail(doing)
            if not isinstance(error, Exception):
                raise
            raise RuntimeError(f"pipeline rank {self._rank} failed {doing}: {error}") from error

    def _announcement(
        self, rows: Rows, microbatches: Sequence[Any], activation_shape: Shape, *, training: bool
    ) -> Announcement | None:
        if not self._channels or self._device.type == "cuda":
            return None
        indices = sorted({action.microbatch for row in rows for action in row})
        return Announcement.of(
            training=training,
            num_microbatches=len(microbatches),
            first=indices[0],
            shapes=[_shape(activation_shape, microbatches[index]) for index in indices],
        )

    def _fail(self, doing: str) -> None:
        """End the communicators at once: nobody waits for this rank any more."""
        self._failure = f"rank {self._rank} failed {doing}"
        for channel in self._channels.values():
            channel.abort()
        self._channels = {}


def _check_kinds(
    schedule: object, stages: object, dtype: object, timeout: object, split_rules: object
) -> None:
    given = {
        "schedule": (schedule, Schedule),
        "stages": (stages, Mapping),
        "dtype": (dtype, torch.dtype),
        "timeout": (timeout, timedelta),
        "split_rules": (split_rules, Mapping | None),
    }
    for name, (value, kind) in given.items():
        if not isinstance(value, kind):
            wanted = getattr(kind, "__name__", str(kind))
            raise TypeError(f"`{name}` must be a {wanted}, got {value!r}.")
    for op, rule in split_rules.items() if isinstance(split_rules, Mapping) else ():
        if not callable(op) or not isinstance(rule, SplitRule | None):
            raise TypeError(
                "`split_rules` must give a `SplitRule` or None for the function or operator that a "
                f"stage calls, got {rule!r} for {op!r}."
            )


def _shape(activation_shape: Shape, microbatch: Any) -> tuple[int, ...]:
    given = activation_shape(microbatch) if callable(activation_shape) else activation_shape
    if not isinstance(given, Sequence) or not all(isinstance(size, int) for size in given):
        raise ValueError(
            f"`activation_shape` must be a sequence of whole numbers or a function that returns "
            f"one, got {given!r}."
        )
    return tuple(given)
