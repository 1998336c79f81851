"""Triton kernels for the products and the MLP of a mixture of experts; one job a file.

- `tiling`: how a product is cut into tiles, and which cut a size of problem gets.
- `tile_map`: the row tiles of all experts, listed on the device.
- `ragged`: descriptors (TMA on Hopper and newer) that end where an expert's rows end.
- `row_product`: `y = x @ w[e].T`, rows in and rows out.
- `up_product`: rows gathered from tokens, the first product, and the activation behind it.
- `down_gradient`: the gradient of the second product and of the activation.
- `expert_sums`: what biases need, sums over an expert's rows and a vector for each of them.
- `weight_gradient`: `dw[e] = dy_e.T @ x_e`.
- `activation`, `collect`, `sort_routes`: element-wise formulas, the sum over a token's rows, and
  the order of the routes.

Nothing here reads the device from the host. This package is imported only where a kernel runs.
"""
