"""Triton kernels for MXFP8: between ordinary tensors and codes with scale bytes, and products.

- `codes`: one element, one scale, in integer arithmetic, as every kernel uses them.
- `quantize`: along the last dimension, along another one, both from one read, or in tiles;
  `quantize_pairs`: columns and both of bfloat16, two values at a time; `quantize_transpose`:
  weights and their transposes from one read.
- `dequantize`: the values again; `dequantize_rows`: of chosen rows.
- `swiglu`: the activation and its gradient, quantised as they are computed.
- `tiling`, `tile_list`, `ragged`: how a product is cut; only the device knows the experts' rows.
- `row_product`: `a @ b[e].T` of ordinary operands or, on Blackwell, of codes; `coarse_product`: of
  codes on Hopper; `outer_product`: `a_e.T @ b_e`.
- `quantize_tokens`, `token_product`: the weight gradient on FP8 units, along the tokens of experts.

Codes and scales are bit for bit what `reference.py` defines. This package is imported only where a
kernel runs.
"""
