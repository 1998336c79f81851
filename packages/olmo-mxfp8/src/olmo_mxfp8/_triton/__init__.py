"""Triton kernels for MXFP8: between ordinary tensors and codes with scale bytes.

- `codes`: one element, one scale, in integer arithmetic, as every kernel uses them.
- `quantize`: along the last dimension, along another one, or both from one read.
- `dequantize`: the values again.

They are bit for bit what `reference.py` defines. This package is imported only where a kernel runs.
"""
