"""The definition of correct: one AdamW or Muon step and the global norm, in one process.

AdamW (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2), at step t >= 1:

    m <- b1 m + (1 - b1) g                    v <- b2 v + (1 - b2) g^2
    w <- w - lr wd w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Muon (Keller Jordan, kellerjordan.github.io/posts/muon, with the averaging momentum of
`torch.optim.Muon`), for one matrix:

    B <- mu B + (1 - mu) G               U = (1 - mu) G + mu B
    w <- w - lr wd w - lr s O(U)         s = sqrt(max(1, rows / columns)), or 0.2 sqrt(max(both))

O is the orthogonalisation below: singular values end near 1 (0.7 to 1.2), singular vectors stay.

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


MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MUON_EPS = 1e-7


def orthogonalize(matrix: torch.Tensor, *, num_iterations: int = 5) -> torch.Tensor:
    """Return the Newton-Schulz iteration's approximation of the nearest semi-orthogonal matrix.

    `X <- G / |G|_F`, then with (a, b, c) `A = X X^T`, `X <- a X + (b A + c A A) X`. A matrix taller
    than wide is transposed, so that `A` is the smaller product.

    Args:
        matrix: (rows, columns), any floating dtype, which is that of the products.
        num_iterations: >= 1.
    """
    a, b, c = MUON_COEFFICIENTS
    x = matrix / torch.linalg.vector_norm(matrix).clamp(min=MUON_EPS)
    tall = matrix.shape[0] > matrix.shape[1]
    x = x.T if tall else x
    for _ in range(num_iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def muon(
    weight: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    scale: str,
    num_iterations: int = 5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weight, momentum buffer) after one step; the inputs stay as they are.

    Args:
        weight: (rows, columns), any floating dtype; the other tensors have the same.
        grad: gradient of the loss.
        momentum_buffer: zeros before the first step.
        lr: learning rate, >= 0.
        momentum: in [0, 1).
        nesterov: whether the gradient is mixed in once more.
        weight_decay: decoupled decay, >= 0.
        scale: "shape" for `sqrt(max(1, rows / columns))`, "adamw_rms" for
            `0.2 sqrt(max(rows, columns))`.
        num_iterations: of `orthogonalize`.
    """
    rows, columns = weight.shape
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * grad
    update = (1 - momentum) * grad + momentum * momentum_buffer if nesterov else momentum_buffer
    factor = (
        max(1.0, rows / columns) ** 0.5 if scale == "shape" else 0.2 * max(rows, columns) ** 0.5
    )
    direction = orthogonalize(update, num_iterations=num_iterations)
    return weight - lr * weight_decay * weight - lr * factor * direction, momentum_buffer


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
