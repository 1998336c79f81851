"""Triton kernels of the optimizer step: one pass over memory each.

- `adamw`: the update of one slice, with the copy in the parameter's dtype.
- `accumulate`: a gradient added to an FP32 line.

This package is imported only where a kernel runs.
"""
