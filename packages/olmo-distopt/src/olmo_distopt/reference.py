"""The definition of correct: one AdamW step and the global norm, in one process.

AdamW (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2), at step t >= 1:

    m <- b1 m + (1 - b1) g                    v <- b2 v + (1 - b2) g^2
    w <- w - lr wd w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Nothing here knows a process group: a sharded, replicated step must give what these lines give.
Use float64 tensors for an oracle.
"""

import math
from collections.abc import Iterable

import torch


def adamw(
    weight: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (weight, exp_avg, exp_avg_sq) after one step; the inputs stay as they are.

    Args:
        weight: any shape, any floating dtype; the other tensors have the same.
        grad: gradient of the loss.
        exp_avg: first moment, zeros before step 1.
        exp_avg_sq: second moment, zeros before step 1.
        step: number of this step, from 1.
        lr: learning rate, >= 0.
        betas: decay of the moments, each in [0, 1).
        eps: added to the root, > 0.
        weight_decay: decoupled decay, >= 0; 0 for a weight that does not decay.
    """
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad.square()
    mean = exp_avg / (1 - beta1**step)
    root = (exp_avg_sq / (1 - beta2**step)).sqrt()
    weight = weight - lr * weight_decay * weight - lr * mean / (root + eps)
    return weight, exp_avg, exp_avg_sq


def global_norm(grads: Iterable[torch.Tensor], *, norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all the gradients' elements together, a 0-d float64.

    Args:
        grads: the gradient of every parameter of the whole model, each once, of any shapes.
        norm_type: 2.0 or `math.inf`.
    """
    flat = [grad.double().flatten() for grad in grads]
    elements = torch.cat([torch.zeros(1, dtype=torch.float64), *flat])
    if norm_type == math.inf:
        return elements.abs().max()
    return elements.square().sum().sqrt()
