"""Triton kernels of the optimizer step: one pass over memory each.

- `adamw`: the update of many slices in a launch, with the copies in the parameters' dtypes.
- `line_table`: where those slices are.
- `accumulate`: a gradient added to an FP32 line.

This package is imported only where a kernel runs.
"""
