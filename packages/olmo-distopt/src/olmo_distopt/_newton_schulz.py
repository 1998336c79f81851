"""The nearest semi-orthogonal matrix, roughly: Newton-Schulz on stacks of matrices.

    X <- G / |G|_F;    five times:  A = X X^T,  X <- a X + (b A + c A A) X

The rule is that of `reference.orthogonalize`. Matrices of one shape are multiplied as one batch.
A and `b A + c A A` are symmetric: the Triton kernels compute half of each and mirror it.

Shapes: n matrices (n, rows, columns).
"""

from collections.abc import Sequence

import torch

from ._bucket_order import fill_buckets
from ._impl import Impl, runs_kernel
from .reference import MUON_COEFFICIENTS, MUON_EPS

# Elements of the matrices of one batch; four copies of them exist at a time.
_BATCH_NUMEL = 2**28
# Matrices with fewer rows leave most of a kernel's tiles empty.
_LEAST_ROWS = 256


def scale_to_unit(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scale each matrix by its Frobenius norm, so that no singular value is above 1.

    Args:
        matrices: (n, rows, columns) float32, n >= 0. Not changed.
        dtype: of the result and of all products: bfloat16, or float32 for a check.
    """
    norm = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    return (matrices / norm.clamp(min=MUON_EPS)).to(dtype)


def orthogonalize(
    stacks: Sequence[torch.Tensor], *, num_iterations: int, impl: Impl = "reference"
) -> list[torch.Tensor]:
    """Return every matrix of every stack orthogonalised.

    Args:
        stacks: (n, rows, columns) each, of `scale_to_unit`; shapes may differ. Not changed.
        num_iterations: Newton-Schulz iterations, >= 1.
        impl: "reference" multiplies by torch alone; "triton" and "auto" by the kernels what they
            can take: bfloat16 on CUDA of compute capability 9.x, from 256 rows or columns on.

    Returns:
        As `stacks`. A matrix of zeros stays zeros.
    """
    results: list[torch.Tensor] = list(stacks)
    batches = fill_buckets(
        range(len(stacks)),
        key=lambda index: tuple(str(size) for size in stacks[index].shape[1:]),
        num_bytes=lambda index: stacks[index].numel(),
        limit=_BATCH_NUMEL,
    )
    for batch in batches:
        together = torch.cat([stacks[index] for index in batch])
        done = _iterate(together, num_iterations, impl).split(
            [len(stacks[index]) for index in batch]
        )
        for index, matrices in zip(batch, done, strict=True):
            results[index] = matrices
    return results


def _iterate(x: torch.Tensor, num_iterations: int, impl: Impl) -> torch.Tensor:
    a, b, c = MUON_COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    if runs_kernel(impl, x.device) and _kernels_take(x):
        from ._triton.newton_schulz import apply, symmetric_product

        x = x.contiguous()
        with torch.cuda.device_of(x):
            for _ in range(num_iterations):
                gram = symmetric_product(x)
                x = apply(symmetric_product(gram, gram, alpha=c, beta=b), x, beta=a)
    else:
        for _ in range(num_iterations):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _kernels_take(x: torch.Tensor) -> bool:
    """Whether (n, rows, columns) has sizes and a dtype for the kernels, and its device the units.

    Triton's interpreter, the one place where they run on a CPU, gets bfloat16 wrong.
    """
    rows, columns = x.shape[1:]
    aligned = all(size * x.element_size() % 16 == 0 for size in (rows, columns))
    if x.device.type == "cpu":
        return aligned and x.dtype == torch.float32
    return (
        aligned
        and x.dtype == torch.bfloat16
        and rows >= _LEAST_ROWS
        and torch.cuda.get_device_capability(x.device)[0] == 9
    )
