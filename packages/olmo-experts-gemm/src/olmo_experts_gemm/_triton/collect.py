# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""The sum over the rows of each token, in slot order, and the gradient of the routes' weights."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def collect(rows_RD: Tensor, row_TK: Tensor) -> Tensor:
    """Add the rows of each token in slot order and float32, (T, D).

    Args:
        rows_RD: Packed rows, (R, D).
        row_TK: The row of each route, (T, K) int32; -1 for none.
    """
    T, K = row_TK.shape
    D = rows_RD.shape[1]
    y_TD = rows_RD.new_empty(T, D)
    block = min(2048, triton.next_power_of_2(D))
    _collect_kernel[(T, triton.cdiv(D, block))](
        rows_RD, row_TK, y_TD, D, K=K, BLOCK=block, num_warps=max(1, block // 256)
    )
    return y_TD


def collect_weight_gradient(ds_PR: Tensor, row_TK: Tensor) -> Tensor:
    """Add the parts of each route's gradient in order, (T, K) float32; 0 for no route."""
    P, R = ds_PR.shape
    ds_TK = torch.empty(row_TK.shape, dtype=torch.float32, device=ds_PR.device)
    block = 256
    _weight_gradient_kernel[(triton.cdiv(row_TK.numel(), block),)](
        ds_PR, row_TK, ds_TK, row_TK.numel(), R, P, BLOCK=block
    )
    return ds_TK


@triton.jit
def _collect_kernel(rows, row_of, y, D, K: tl.constexpr, BLOCK: tl.constexpr):
    """One token and `BLOCK` columns a program."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_of + token * K + k)
        mask = (columns < D) & (row >= 0)
        total += tl.load(rows + row.to(tl.int64) * D + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + token * D + columns, total, mask=columns < D)


@triton.jit
def _weight_gradient_kernel(parts, row_of, ds, N, R, P, BLOCK: tl.constexpr):
    """`BLOCK` routes a program."""
    route = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_of + route, mask=route < N, other=-1)
    total = tl.zeros((BLOCK,), tl.float32)
    part = parts + row
    for _ in range(P):
        total += tl.load(part, mask=row >= 0, other=0.0)
        part += R
    tl.store(ds + route, total, mask=route < N)
