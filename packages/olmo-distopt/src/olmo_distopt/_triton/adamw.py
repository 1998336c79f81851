# pyright: reportArgumentType=false, reportCallIssue=false
"""The AdamW update of one line of elements in one pass over memory.

Read: main, gradient and two moments; written: main, moments and a copy of main in the parameter's
dtype. With FP32 gradients and moments that is 28 bytes an element, and 2 of a BF16 copy. One
program updates a block of consecutive elements, in float32; nothing is shared between programs.

What changes from step to step and may depend on the device (corrections, clip factor, skip) is read
through pointers, so that the host need not know it. Where `skip` holds, every load and store is
masked off. The rule is that of `reference.adamw`; products and sums may be fused, so the result is
close to plain torch's and not bitwise equal.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def adamw(
    main: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    copy: torch.Tensor,
    minus_rate: torch.Tensor,
    root_correction: torch.Tensor,
    grad_scale: torch.Tensor | None,
    skip: torch.Tensor | None,
    *,
    betas: tuple[float, float],
    eps: float,
    keep: float,
) -> None:
    """Update in place; every line is (length,) and contiguous, on one device.

    Args:
        main: float32.
        grad: any floating dtype.
        exp_avg: float32 or bfloat16; `exp_avg_sq` likewise.
        exp_avg_sq: as above.
        copy: of any floating dtype; receives main.
        minus_rate: 0-d float32, `-lr / (1 - b1^t)`.
        root_correction: 0-d float32, `sqrt(1 - b2^t)`.
        grad_scale: 0-d float32 or None.
        skip: 0-d bool or None.
        betas: of the moments.
        eps: added to the root.
        keep: `1 - lr * weight_decay`.
    """
    numel = main.numel()
    with torch.cuda.device_of(main):
        _adamw_kernel[(triton.cdiv(numel, _BLOCK),)](
            *(main, grad, exp_avg, exp_avg_sq, copy),
            *(minus_rate, root_correction),
            minus_rate if grad_scale is None else grad_scale,
            minus_rate if skip is None else skip.view(torch.uint8),
            numel,
            *(1 - betas[0], betas[1], 1 - betas[1], eps, keep),
            SCALED=grad_scale is not None,
            GUARDED=skip is not None,
            BLOCK=_BLOCK,
            num_warps=4,
        )


@triton.jit
def _adamw_kernel(
    main_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    copy_ptr,
    minus_rate_ptr,
    root_correction_ptr,
    grad_scale_ptr,
    skip_ptr,
    numel,
    new_mean,
    old_square,
    new_square,
    eps,
    keep,
    SCALED: tl.constexpr,
    GUARDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program 0 of the grid: which block of `BLOCK` elements; the last one is masked."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    if GUARDED:
        mask = mask & (tl.load(skip_ptr) == 0)
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        grad *= tl.load(grad_scale_ptr)
    mean = tl.load(exp_avg_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    square = tl.load(exp_avg_sq_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    main = tl.load(main_ptr + offsets, mask=mask, other=0.0)
    mean += new_mean * (grad - mean)
    square = square * old_square + new_square * grad * grad
    root = tl.sqrt_rn(square) / tl.load(root_correction_ptr) + eps
    main = main * keep + tl.load(minus_rate_ptr) * mean / root
    tl.store(main_ptr + offsets, main, mask=mask)
    tl.store(exp_avg_ptr + offsets, mean, mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, square, mask=mask)
    tl.store(copy_ptr + offsets, main, mask=mask)
