# pyright: reportArgumentType=false, reportCallIssue=false
"""The AdamW update of many lines of elements in one launch and one pass over memory.

Read: main, gradient and two moments; written: main, moments and a copy of main in the parameter's
dtype. With FP32 gradients and moments that is 28 bytes an element, and 2 of a BF16 copy. One
program updates a block of consecutive elements of one line, in float32; nothing is shared between
programs, so the bits of a line do not depend on what else is in the launch.

What changes from step to step and may depend on the device (corrections, clip factor, skip) is read
through pointers, so that the host need not know it. Where `skip` holds, every load and store is
masked off. The rule is that of `reference.adamw`; products and sums may be fused, so the result is
close to plain torch's and not bitwise equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .line_table import LineTable, Place, is_aligned, make_line_table, place_of

_BLOCK = 1024

_TRITON = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


class Line(NamedTuple):
    """What one update reads and writes: (length,) each, contiguous, on one device.

    Attributes:
        main: float32.
        grad: of 16 bits or more.
        exp_avg: float32 or bfloat16.
        exp_avg_sq: of the dtype of `exp_avg`.
        copy: of 16 or 32 bits; receives main.
    """

    main: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    copy: torch.Tensor


class Form(NamedTuple):
    """What the lines of one launch have in common."""

    grad: torch.dtype
    moment: torch.dtype
    copy: torch.dtype
    is_aligned: bool


def tabulate(lines: Sequence[Line]) -> dict[Form, LineTable]:
    """Return a table of the lines of each form, for `adamw`, as long as no tensor moves.

    Args:
        lines: one or more, none of them empty, all on one device.
    """
    places: dict[Form, list[Place]] = {}
    for line in lines:
        place = place_of(line)
        form = Form(line.grad.dtype, line.exp_avg.dtype, line.copy.dtype, is_aligned(place))
        places.setdefault(form, []).append(place)
    device = lines[0].main.device
    return {form: make_line_table(each, _BLOCK, device) for form, each in places.items()}


def adamw(
    tables: Mapping[Form, LineTable],
    minus_rate: torch.Tensor,
    root_correction: torch.Tensor,
    grad_scale: torch.Tensor | None,
    skip: torch.Tensor | None,
    *,
    betas: tuple[float, float],
    eps: float,
    keep: float,
) -> None:
    """Update in place, in one launch for all lines of the same dtypes and alignment.

    Args:
        tables: of `tabulate`; the tensors of its lines are where they were.
        minus_rate: 0-d float32, `-lr / (1 - b1^t)`, on the lines' device.
        root_correction: 0-d float32, `sqrt(1 - b2^t)`.
        grad_scale: 0-d float32 or None.
        skip: 0-d bool or None.
        betas: of the moments.
        eps: added to the root.
        keep: `1 - lr * weight_decay`.
    """
    for form, table in tables.items():
        with torch.cuda.device_of(minus_rate):
            _adamw_kernel[(table.owners.numel(),)](
                *(table.rows, table.owners, minus_rate, root_correction),
                minus_rate if grad_scale is None else grad_scale,
                minus_rate if skip is None else skip.view(torch.uint8),
                *(1 - betas[0], betas[1], 1 - betas[1], eps, keep),
                GRAD=_TRITON[form.grad],
                MOMENT=_TRITON[form.moment],
                COPY=_TRITON[form.copy],
                ALIGNED=form.is_aligned,
                SCALED=grad_scale is not None,
                GUARDED=skip is not None,
                BLOCK=_BLOCK,
                num_warps=4,
            )


@triton.jit
def _pointer(entry, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the address in the table at `entry` as a pointer, of 16-byte alignment if told so."""
    pointer = tl.load(entry).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _adamw_kernel(
    table,
    owners,
    minus_rate_ptr,
    root_correction_ptr,
    grad_scale_ptr,
    skip_ptr,
    new_mean,
    old_square,
    new_square,
    eps,
    keep,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    COPY: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALED: tl.constexpr,
    GUARDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program 0 of the grid: which block of `BLOCK` elements; the last one of a line is masked."""
    block = tl.program_id(0)
    row = table + tl.load(owners + block).to(tl.int64) * 7
    main_ptr = _pointer(row, tl.float32, ALIGNED)
    grad_ptr = _pointer(row + 1, GRAD, ALIGNED)
    exp_avg_ptr = _pointer(row + 2, MOMENT, ALIGNED)
    exp_avg_sq_ptr = _pointer(row + 3, MOMENT, ALIGNED)
    copy_ptr = _pointer(row + 4, COPY, ALIGNED)
    numel = tl.load(row + 5)
    if ALIGNED:
        numel = tl.multiple_of(numel, 16)
    offsets = (block - tl.load(row + 6)) * BLOCK + tl.arange(0, BLOCK)
    # Four a thread at a time, also of 16 bits: eight would give FP32 another layout, and each line
    # would pass through shared memory between the two.
    offsets = tl.max_contiguous(offsets, 4)
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
