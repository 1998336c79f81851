"""Adding one microbatch's gradient, of any dtype, to an FP32 line.

`main_grad += grad`: 2 + 4 + 4 bytes a BF16 element.
"""

import torch

from ._impl import Impl, runs_kernel


def accumulate(main_grad: torch.Tensor, grad: torch.Tensor, impl: Impl) -> None:
    """Add `grad` to `main_grad`, in the precision of `main_grad`; the same bits by any `impl`.

    Args:
        main_grad: float32 (or float64 with "reference" or "auto"), contiguous, any shape.
        grad: of that shape, any floating dtype that is no wider; sparse gradients are plain
            torch's.
        impl: as in `GradientReducer`.
    """
    takes = main_grad.dtype == torch.float32 and grad.layout == torch.strided
    if takes and main_grad.numel() and runs_kernel(impl, main_grad.device):
        from ._triton.accumulate import accumulate as accumulate_kernel

        accumulate_kernel(main_grad, grad)
    else:
        main_grad.add_(grad)
