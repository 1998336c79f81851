"""One optimizer step: forward and backward of the global batch, one reduction, one update.

    counts of the global batch -> executor (all microbatches) -> statistics and gradients reduced
    -> one norm, one clip factor, one verdict of the guard -> selection biases -> optimizer

A step that drops too many routes runs its first half again (`rerun.py`). The halves are separate
because `verify` looks at the gradients between them. On a GPU neither waits for the device, but for
reruns: what else the host wants to know of a step is read later (`step_reader.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from olmo_distopt import clip_factor, global_grad_norm

from olmo_trainer.build import Assembly
from olmo_trainer.config import SkipGuard
from olmo_trainer.data import Batch
from olmo_trainer.guard import Skips
from olmo_trainer.rerun import Reruns
from olmo_trainer.stage import Microbatch


class NonFiniteError(RuntimeError):
    """The run has diverged: a NaN or an infinity, or too many steps in a row left out."""


@dataclass(frozen=True)
class Update:
    """How an update went; the same on every rank, on the device where nothing else is said."""

    norm: torch.Tensor  # of the gradient, before clipping; 0-d float32
    verdict: torch.Tensor  # of the guard, for `check_update`; empty without one
    reruns: Reruns  # plain values


def count_tokens(assembly: Assembly, batches: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global batch's targets and real tokens, each 0-d float32 on the device."""
    totals = torch.stack(
        (
            torch.stack([(batch.targets_BS >= 0).sum() for batch in batches]).sum(),
            torch.stack([batch.mask_BS.sum() for batch in batches]).sum(),
        )
    ).to(torch.float32)
    loss_tokens, real_tokens = assembly.mesh.sum_over_stage(totals)
    return loss_tokens, real_tokens


def accumulate_gradients(
    assembly: Assembly,
    batches: Sequence[Batch],
    *,
    loss_scale: float = 1.0,
    stop: bool = False,
    save_failed: bool = False,
    attention_flops: float = 0.0,
    enter: Callable[[str], None] = lambda phase: None,
) -> None:
    """Run this rank's microbatches; leave the reduced gradients in `main_grad`.

    The statistics are reduced over the world too. What drops too many routes is run again, from
    nothing: see `StepRerun`.

    Args:
        assembly: This rank's parts.
        batches: Its microbatches of the global batch, `batch.accumulation` of them, on the device.
        loss_scale: 0 leaves the gradient of the auxiliary losses alone.
        stop: This rank asks all ranks to stop after the step.
        save_failed: This rank knows that the save in the background came to nothing.
        attention_flops: Useful operations of attention in documents that this rank tells of.
        enter: Is told each phase that begins (`phases.py`).

    Raises:
        DroppedError: There is no room for the larger buffers of a rerun.
    """
    enter("wait")
    loss_tokens, real_tokens = count_tokens(assembly, batches)
    # A global batch without one target has loss 0, not 0 / 0.
    loss_tokens, real_tokens = loss_tokens.clamp_min(1.0), real_tokens.clamp_min(1.0)
    microbatches = [Microbatch(batch, loss_tokens, real_tokens, loss_scale) for batch in batches]
    width = assembly.config.model.d_model

    def run() -> None:
        assembly.statistics.zero()
        if stop:
            assembly.statistics.request_stop()
        if save_failed:
            assembly.statistics.report_failed_save()
        if attention_flops:
            assembly.statistics.add_attention(attention_flops)
        assembly.reducer.zero(num_gradients=len(microbatches))
        assembly.executor.run(
            microbatches, activation_shape=lambda each: (*each.batch.tokens_BS.shape, width)
        )
        enter("reduce")
        assembly.reducer.reduce()
        assembly.mesh.sum_over_world(assembly.statistics.vector)

    if assembly.rerun is None:
        run()
    else:
        assembly.rerun.repeat(run, assembly.statistics)


def gradient_norm(assembly: Assembly) -> torch.Tensor:
    """Return the 2-norm of the whole model's gradient, the same on every rank."""
    return global_grad_norm(
        assembly.parameters, assembly.replica_groups, group=assembly.mesh.world_group
    )


def update_biases(assembly: Assembly, skip: torch.Tensor | None = None) -> None:
    """Move each selection bias by the requested counts of the global batch.

    Where `skip` (0-d bool on the device) is true they keep their bits.
    """
    for layer, bias in assembly.selection_biases.items():
        before = None if skip is None else bias.bias_E.clone()
        bias.update(assembly.statistics.counts(layer))
        if skip is not None and before is not None:
            torch.where(skip, before, bias.bias_E, out=bias.bias_E)


def update(assembly: Assembly, step: int, rate: float) -> Update:
    """Clip, move the selection biases and step the optimizer, or leave all of them as they are.

    A gradient that is not finite moves nothing. `step`, from 1, is for the message.

    Raises:
        NonFiniteError: As `check_update`, on every rank alike, but for the guard's patience: at
            once where the host has the norm, as on a CPU; elsewhere the caller finds out when it
            reads the update, and nothing moves until then.
        DroppedError: On every rank alike: the step drops too many routes. Nothing is changed.
    """
    if assembly.rerun is not None:
        assembly.rerun.require_room(step)
    config, guard = assembly.config, assembly.guard
    norm = gradient_norm(assembly)
    verdict = norm.new_zeros(0, dtype=torch.int64)
    if guard is not None:
        skip, verdict = guard.check(assembly.statistics.loss, norm), guard.verdict()
    elif assembly.mesh.host_waits:
        skip = assembly.breaker.check(norm)
    else:
        skip = None
        _require_finite(step, float(norm))
    update_biases(assembly, skip)
    factor = clip_factor(norm, config.optimizer.max_grad_norm)
    assembly.optimizer.step(lr=rate, grad_scale=factor, skip=skip)
    reruns = Reruns() if assembly.rerun is None else assembly.rerun.report()
    return Update(norm, verdict, reruns)


def check_update(assembly: Assembly, step: int, norm: float, verdict: Sequence[float]) -> Skips:
    """Return what the guard did in `step`, from the numbers of its `Update` on the host.

    Called once a step, in the order of the steps.

    Raises:
        NonFiniteError: On every rank alike: the gradient is not finite and there is no guard to
            skip the step, or the guard has lost its patience.
    """
    if assembly.guard is None:
        _require_finite(step, norm)
        return Skips()
    skips, guard = assembly.guard.report(verdict), assembly.config.guard
    if isinstance(guard, SkipGuard) and skips.in_a_row >= guard.patience:
        raise NonFiniteError(
            f"step {step}: the last {skips.in_a_row} steps were all left out, this one because: "
            f"{', '.join(skips.reasons)}. Lower optimizer.learning_rate or look at the data, and "
            "resume."
        )
    return skips


def _require_finite(step: int, norm: float) -> None:
    if not math.isfinite(norm):
        raise NonFiniteError(
            f"step {step}: the gradient norm is {norm}; nothing was updated. Lower "
            "optimizer.learning_rate, look at the data of this step, or leave such steps out with "
            "guard.kind=skip."
        )


def heldout_loss(assembly: Assembly, batches: Sequence[Batch]) -> tuple[float, int]:
    """Return the mean cross entropy over all held-out targets, in nats a token, and their number.

    Collective: every data rank passes the same number of batches.
    """
    mesh = assembly.mesh
    loss_tokens, real_tokens = count_tokens(assembly, batches)
    loss_tokens, real_tokens = loss_tokens.clamp_min(1.0), real_tokens.clamp_min(1.0)
    microbatches = [Microbatch(batch, loss_tokens, real_tokens) for batch in batches]
    width = assembly.config.model.d_model
    evaluated = assembly.executor.evaluate(
        microbatches, activation_shape=lambda each: (*each.batch.tokens_BS.shape, width)
    )
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for loss in evaluated.losses:
        total += loss
    return mesh.sum_over_world(total).item(), int(loss_tokens.item())
