"""One AdamW update of one line of elements, in place, by plain torch or by a Triton kernel.

The elementwise rule is that of `reference.adamw`, in the order of operations of
`torch.optim.AdamW`; in float32, whatever the dtype of the moments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ._impl import Impl, require_impl, runs_kernel
from ._sharded_optimizer import require_range
from ._tensor_state import TensorState

# A BF16 number is not moved by less than half its spacing, which is up to 2^-7 of its value. A
# moment that decays by less than that a step would never decay.
_LEAST_BF16_DECAY = 2.0**-8

EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWRule:
    """What does not change between steps.

    Raises:
        ValueError: a number out of range, or BF16 moments that would stand still.
        RuntimeError: "triton" without triton.
    """

    betas: tuple[float, float]
    eps: float
    moment_dtype: torch.dtype
    impl: Impl

    def __post_init__(self) -> None:
        require_impl(self.impl)
        require_range("betas[0]", self.betas[0], 0.0, 1.0)
        require_range("betas[1]", self.betas[1], 0.0, 1.0)
        if not 0 < self.eps < math.inf:
            raise ValueError(f"`eps` must be > 0 and finite, got {self.eps}.")
        if self.moment_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"`moment_dtype` must be float32 or bfloat16, got {self.moment_dtype}."
            )
        if self.moment_dtype == torch.bfloat16 and max(self.betas) > 1 - _LEAST_BF16_DECAY:
            raise ValueError(
                f"`betas` must be at most 1 - 2^-8 with bfloat16 moments, got {self.betas}: a "
                "moment that changes by less a step is rounded back; use float32 moments."
            )

    def moments(self) -> dict[str, torch.dtype]:
        """Return the dtype of each moment, by its name in a checkpoint."""
        return {EXP_AVG: self.moment_dtype, EXP_AVG_SQ: self.moment_dtype}

    def corrections(self, num_steps: torch.Tensor) -> Corrections:
        """Return the corrections of the step that makes the count `num_steps`, 0-d int64."""
        steps = num_steps.double()
        beta1, beta2 = self.betas
        return Corrections(1 - beta1**steps, (1 - beta2**steps).sqrt())


@dataclass(frozen=True, slots=True)
class Corrections:
    """How far the moments still are from averages: `1 - b1^t` and `sqrt(1 - b2^t)`, 0-d float64."""

    mean: torch.Tensor
    root: torch.Tensor


def update_adamw(
    state: TensorState,
    grad: torch.Tensor,
    rule: AdamWRule,
    corrections: Corrections,
    *,
    lr: float,
    decay: float,
    grad_scale: torch.Tensor | None,
    skip: torch.Tensor | None,
) -> None:
    """Update main weights and moments in place, and write the weights into the parameter.

    Args:
        state: with the moments `exp_avg` and `exp_avg_sq`.
        grad: (length,) any floating dtype.
        rule: the constants.
        corrections: of this step.
        lr: learning rate of this parameter.
        decay: weight decay of this parameter, a rate.
        grad_scale: 0-d factor of the gradient, or None.
        skip: 0-d bool; where True nothing changes a bit. None: False.
    """
    main, device = state.main, state.main.device
    if main.numel() == 0:
        return
    minus_rate = (-lr / corrections.mean).to(device, torch.float32)
    root_correction = corrections.root.to(device, torch.float32)
    grad_scale = None if grad_scale is None else grad_scale.to(device, torch.float32)
    skip = None if skip is None else skip.to(device)
    exp_avg, exp_avg_sq = state.moments[EXP_AVG], state.moments[EXP_AVG_SQ]
    copy = state.slice_of(state.parameter)
    if runs_kernel(rule.impl, device):
        from ._triton.adamw import adamw

        adamw(
            *(main, grad, exp_avg, exp_avg_sq, copy),
            *(minus_rate, root_correction, grad_scale, skip),
            betas=rule.betas,
            eps=rule.eps,
            keep=1 - lr * decay,
        )
        return
    beta1, beta2 = rule.betas
    grad = grad.float() if grad_scale is None else grad.float() * grad_scale
    old = (main, exp_avg, exp_avg_sq)
    new_main, mean, square = (each.to(torch.float32, copy=skip is not None) for each in old)
    if decay:
        new_main.mul_(1 - lr * decay)
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = square.sqrt().div_(root_correction).add_(rule.eps)
    new_main.addcdiv_(mean * minus_rate, root)
    write(old, (new_main, mean, square), skip)
    copy.copy_(main)


def write(
    old: tuple[torch.Tensor, ...], new: tuple[torch.Tensor, ...], skip: torch.Tensor | None
) -> None:
    """Copy each of `new` over its `old`, in the dtype of `old`, unless `skip`."""
    for before, after in zip(old, new, strict=True):
        if after is not before:
            before.copy_(after if skip is None else torch.where(skip, before, after))
