"""One optimizer step: forward and backward of the global batch, one reduction, one update.

    counts of the global batch -> executor (all microbatches) -> statistics and gradients reduced
    -> one norm, one clip factor -> selection biases -> optimizer

The halves are separate because `verify` looks at the gradients between them.
"""

import math
from collections.abc import Callable, Sequence

import torch
from olmo_distopt import clip_grad_norm, global_grad_norm

from olmo_trainer.build import Assembly
from olmo_trainer.data import Batch
from olmo_trainer.stage import Microbatch


class NonFiniteError(RuntimeError):
    """A gradient norm or a held-out loss is NaN or infinite: the run has diverged."""


def count_tokens(assembly: Assembly, batches: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global batch's targets and real tokens, each 0-d float32 on the device."""
    totals = torch.stack(
        (
            torch.stack([(batch.targets_BS >= 0).sum() for batch in batches]).sum(),
            torch.stack([batch.mask_BS.sum() for batch in batches]).sum(),
        )
    ).to(torch.float32)
    loss_tokens, real_tokens = assembly.mesh.sum_over_data(totals)
    return loss_tokens, real_tokens


def accumulate_gradients(
    assembly: Assembly,
    batches: Sequence[Batch],
    *,
    loss_scale: float = 1.0,
    stop: bool = False,
    save_failed: bool = False,
    enter: Callable[[str], None] = lambda phase: None,
) -> None:
    """Run this rank's microbatches; leave the reduced gradients in `main_grad`.

    The statistics are reduced over the world too.

    Args:
        assembly: This rank's parts.
        batches: Its microbatches of the global batch, `batch.accumulation` of them, on the device.
        loss_scale: 0 leaves the gradient of the auxiliary losses alone.
        stop: This rank asks all ranks to stop after the step.
        save_failed: This rank knows that the save in the background came to nothing.
        enter: Is told each phase that begins (`phases.py`).
    """
    assembly.statistics.zero()
    if stop:
        assembly.statistics.request_stop()
    if save_failed:
        assembly.statistics.report_failed_save()
    assembly.reducer.zero()
    enter("wait")
    loss_tokens, real_tokens = count_tokens(assembly, batches)
    # A global batch without one target has loss 0, not 0 / 0.
    loss_tokens, real_tokens = loss_tokens.clamp_min(1.0), real_tokens.clamp_min(1.0)
    microbatches = [Microbatch(batch, loss_tokens, real_tokens, loss_scale) for batch in batches]
    width = assembly.config.model.d_model
    assembly.executor.run(
        microbatches, activation_shape=lambda each: (*each.batch.tokens_BS.shape, width)
    )
    enter("reduce")
    assembly.reducer.reduce()
    assembly.mesh.sum_over_world(assembly.statistics.vector)


def gradient_norm(assembly: Assembly) -> torch.Tensor:
    """Return the 2-norm of the whole model's gradient, the same on every rank."""
    return global_grad_norm(
        assembly.parameters, assembly.replica_groups, group=assembly.mesh.world_group
    )


def update_biases(assembly: Assembly) -> None:
    """Move each selection bias by the requested counts of the global batch."""
    for layer, bias in assembly.selection_biases.items():
        bias.update(assembly.statistics.counts(layer))


def update(assembly: Assembly, step: int, rate: float) -> float:
    """Clip, move the selection biases, step the optimizer; return the norm before clipping.

    `step`, from 1, is for the message.

    Raises:
        NonFiniteError: On every rank alike, before anything is changed.
    """
    norm = float(
        clip_grad_norm(
            assembly.parameters,
            assembly.replica_groups,
            assembly.config.optimizer.max_grad_norm,
            group=assembly.mesh.world_group,
        )
    )
    if not math.isfinite(norm):
        raise NonFiniteError(
            f"step {step}: the gradient norm is {norm}; nothing was updated. Lower "
            "optimizer.learning_rate or look at the data of this step."
        )
    update_biases(assembly)
    assembly.optimizer.step(lr=rate)
    return norm


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
