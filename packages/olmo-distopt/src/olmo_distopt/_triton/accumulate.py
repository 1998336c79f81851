# pyright: reportArgumentType=false, reportCallIssue=false
"""`main_grad += grad` in one pass: 2 bytes of a BF16 gradient read, 4 of the line read and written.

One program adds a block of consecutive elements; nothing is shared between programs. The sum is in
float32.

One launch a gradient, unlike the update's: backward brings gradients one by one, and to add many at
once would keep all of them in memory until then, and `main_grad` wrong for whoever adds to it.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 2048


def accumulate(main_grad: torch.Tensor, grad: torch.Tensor) -> None:
    """Add `grad`, of any shape and floating dtype, to `main_grad`, float32 and contiguous."""
    numel = main_grad.numel()
    with torch.cuda.device_of(main_grad):
        _accumulate_kernel[(triton.cdiv(numel, _BLOCK),)](
            main_grad, grad.contiguous(), numel, BLOCK=_BLOCK, num_warps=8
        )


@triton.jit
def _accumulate_kernel(main_grad_ptr, grad_ptr, numel, BLOCK: tl.constexpr):
    """Program 0 of the grid: which block of `BLOCK` elements; the last one is masked."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offsets = tl.max_contiguous(offsets, 4)  # also of 16 bits: see `adamw`
    mask = offsets < numel
    total = tl.load(main_grad_ptr + offsets, mask=mask)
    grad = tl.load(grad_ptr + offsets, mask=mask)
    tl.store(main_grad_ptr + offsets, total + grad.to(tl.float32), mask=mask)
