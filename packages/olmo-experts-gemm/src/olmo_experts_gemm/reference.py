"""The definition of correct: a loop over the experts in plain torch.

    grouped_mm     y[r]  = x[r] @ w[e].T                   for the rows r of expert e
    grouped_outer  dw[e] = sum over rows r of e of  dy[r] (outer) x[r]

Expert e owns the rows `offsets_E[e-1] : offsets_E[e]` (from 0 for the first). The two products are
each other's derivatives: the gradient of `grouped_mm` is `dx = grouped_mm(dy, w.mT)` and
`dw = grouped_outer(dy, x)`.

Rows past `offsets_E[-1]` are never read, because they may hold anything: `0 * NaN` is NaN, so no
mask after the fact could save the sum. Both functions write all of their output.

Any float dtype, float64 included, on any device. Sums are what `torch.mm` makes of them: float32
for the 16-bit types, the type itself otherwise. The offsets are read on the host, so on a GPU each
call waits for the device.

Shapes: R rows, E experts, D inner width, F outer width.
"""

import torch
from torch import Tensor


def grouped_mm(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """Multiply each expert's rows by its weights; rows past the last offset become zero."""
    y_RF = x_RD.new_empty(x_RD.shape[0], w_EFD.shape[1])
    start = 0
    for w_FD, end in zip(w_EFD, offsets_E.tolist(), strict=True):
        if end > start:
            torch.mm(x_RD[start:end], w_FD.t(), out=y_RF[start:end])
        start = end
    y_RF[start:].zero_()
    return y_RF


def grouped_outer(dy_RF: Tensor, x_RD: Tensor, offsets_E: Tensor) -> Tensor:
    """Sum the outer products of each expert's rows, (E, F, D); an expert without rows gets zero."""
    dw_EFD = dy_RF.new_empty(offsets_E.shape[0], dy_RF.shape[1], x_RD.shape[1])
    start = 0
    for dw_FD, end in zip(dw_EFD, offsets_E.tolist(), strict=True):
        if end > start:
            torch.mm(dy_RF[start:end].t(), x_RD[start:end], out=dw_FD)
        else:
            dw_FD.zero_()
        start = end
    return dw_EFD
