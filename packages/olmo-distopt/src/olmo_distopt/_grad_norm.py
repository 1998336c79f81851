"""One gradient norm of the whole model, and clipping by it.

    |g|   = sqrt( sum over the elements of every parameter, each once, of g^2 )
    g    <- g * min(1, max_norm / |g|)

"Each once" is what goes wrong in parallel: a dense gradient lies on every data-parallel process, an
expert's on some of them, a pipeline stage holds only its layers. Here the process with rank 0 in a
parameter's replica group counts it, or, after a reduce-scatter, every replica its own range; and
one all-reduce over all processes that hold the model adds up. The number is the same on every
process and in every layout, so the factor is too.

Elements are squared and summed in FP64: no overflow above 1.8e19, and no visible dependence on the
order of the sum. Nothing is read from the device by the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ._arguments import require_positive, require_zero_d
from ._collective import collective_device, is_together
from ._groups import ReplicaGroups
from ._parameters import main_grad, scattered_range, trainable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Elements that a CPU converts to FP64 at a time: 128 MiB.
_PIECE = 2**24


def global_grad_norm(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    replica_groups: ReplicaGroups,
    *,
    norm_type: float = 2.0,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the norm of `main_grad` over all parameters of the model, the same on every process.

    Call it after `GradientReducer.reduce()`, on every process of `group`: one collective, also for
    a process that holds no parameter.

    Args:
        named_parameters: what this process holds, all pipeline chunks together, each once. May be
            empty.
        replica_groups: who holds replicas of which parameter.
        norm_type: 2.0, or `math.inf` for the largest absolute value.
        group: all processes that hold the model. None: the default group if torch.distributed is
            initialised, else this process alone.

    Returns:
        0-d float32, on the parameters' device. NaN when any gradient anywhere holds a NaN, else inf
        when one holds an infinity.

    Raises:
        ValueError: `norm_type` is neither, or a parameter has no `main_grad`.
        RuntimeError: gradients are not reduced.
    """
    _require_norm_type(norm_type)
    grads, counted = _gradients(named_parameters, replica_groups)
    return _norm(grads, counted, norm_type, group).float()


def clip_grad_norm(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    replica_groups: ReplicaGroups,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale every `main_grad` by one factor so that the norm of the model is at most `max_norm`.

    The factor is `max_norm / norm` when the norm is finite and above `max_norm`. Otherwise it is
    exactly 1 and the gradients keep their bits: also when the norm is NaN or infinite, since no
    factor can mend that. A NaN then stays where it is, to be found, and never becomes 0; test the
    norm that is returned before the optimizer step.

    Args:
        named_parameters: as in `global_grad_norm`.
        replica_groups: who holds replicas of which parameter.
        max_norm: largest norm that stays unscaled, > 0; `math.inf` only measures.
        norm_type: 2.0 or `math.inf`.
        group: as in `global_grad_norm`.

    Returns:
        The norm before clipping, 0-d float32, the same on every process.

    Raises:
        ValueError: `max_norm` is not above 0, or as in `global_grad_norm`.
    """
    require_positive("max_norm", max_norm)
    _require_norm_type(norm_type)
    grads, counted = _gradients(named_parameters, replica_groups)
    norm = _norm(grads, counted, norm_type, group)
    factor = _factor(norm, max_norm)
    together: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        together.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), each in together.items():
        torch._foreach_mul_(each, factor.to(device, dtype))
    return norm.float()


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor that clips by a norm, for `step(grad_scale=...)`: no pass over gradients.

    Args:
        norm: of `global_grad_norm`, 0-d.
        max_norm: largest norm that stays unscaled, > 0.

    Returns:
        `max_norm / norm` where the norm is finite and above `max_norm`, else 1; 0-d float32.

    Raises:
        TypeError: `norm` is no tensor, or `max_norm` no number.
        ValueError: `max_norm` is not above 0.
    """
    require_zero_d("norm", norm)
    require_positive("max_norm", max_norm)
    return _factor(norm.double(), max_norm).float()


def _require_norm_type(norm_type: float) -> None:
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"`norm_type` must be 2.0 or `math.inf`, got {norm_type}.")


def _factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    return torch.where((norm > max_norm) & norm.isfinite(), max_norm / norm, 1.0)


def _gradients(
    named_parameters: Iterable[tuple[str, nn.Parameter]], replica_groups: ReplicaGroups
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return every summed gradient held here, and those of them that this process counts."""
    grads: list[torch.Tensor] = []
    counted: list[torch.Tensor] = []
    for name, parameter in trainable(named_parameters):
        grad, held = main_grad(name, parameter), scattered_range(parameter)
        if held is not None:
            grad = grad.view(-1).narrow(0, *held)
        grads.append(grad)
        counts = held is not None or replica_groups.of(name, parameter).rank == 0
        if counts and grad.numel() > 0:
            counted.append(grad)
    return grads, counted


def _norm(
    grads: list[torch.Tensor],
    counted: list[torch.Tensor],
    norm_type: float,
    group: ProcessGroup | None,
) -> torch.Tensor:
    """Return the norm as 0-d float64."""
    device = collective_device(grads, group)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    if norm_type == 2.0:
        total = _sum_of_squares(counted, zero)
        if is_together():
            dist.all_reduce(total, group=group)
        return total.sqrt()
    largest = torch.stack([zero, *(grad.abs().amax().to(device, zero.dtype) for grad in counted)])
    # A MAX over processes may drop a NaN, so it travels as a flag beside the largest number.
    number = largest.nan_to_num(nan=0.0, posinf=math.inf).amax()
    pair = torch.stack([number, largest.isnan().any().to(number.dtype)])
    if is_together():
        dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
    return torch.where(pair[1] > 0, math.nan, pair[0])


def _sum_of_squares(grads: list[torch.Tensor], zero: torch.Tensor) -> torch.Tensor:
    """Return the sum over all elements of all tensors, added to `zero`, a 0-d float64."""
    pieces: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        cut = grad.flatten().split(_PIECE) if grad.numel() > _PIECE else (grad,)
        pieces.setdefault(grad.device, []).extend(cut)
    for each in pieces.values():
        # Few launches for many tensors; the squares of the roots are off by bits of FP64.
        norms = torch.stack(torch._foreach_norm(each, 2.0, dtype=torch.float64))
        zero = zero + norms.square().sum().to(zero.device)
    return zero
