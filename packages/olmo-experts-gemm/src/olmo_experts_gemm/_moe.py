"""A mixture of experts from tokens to tokens, on one device.

    y[t] = sum over k of  weights[t, k] * f_e(x[t]),   e = expert_ids[t, k]

with the SwiGLU MLP `f_e` of `swiglu_experts`. The routes are sorted by (expert, token, slot), each
expert runs on its rows, and the rows of a token are added in slot order.

Shapes: T tokens, K experts a token, N = T*K routes, E experts, D model width, H hidden width.
"""

from torch import Tensor

from ._checks import check_experts, check_routes, check_rows
from ._grouped_mm import Impl, pick
from ._permute import collect_rows, gather_rows, sort_routes
from ._swiglu import swiglu_experts


def moe_mlp(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    w_gate_up_E2HD: Tensor,
    w_down_EDH: Tensor,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Send each token to its experts and return the weighted sum of what they make of it.

    Args:
        x_TD: Tokens, (T, D); float16, bfloat16, float32 or float64. T may be 0.
        expert_ids_TK: The experts of each token, (T, K) int64 or int32, in [0, E), none twice in
            one token; -1 is no route.
        weights_TK: The weight of each route, (T, K), any float dtype; not read where the id is -1.
        w_gate_up_E2HD: Gate rows first, then up rows, (E, 2H, D); the dtype of `x_TD`.
        w_down_EDH: (E, D, H); the dtype of `x_TD`.
        impl: Which grouped product, as for `grouped_mm`.

    Returns:
        `y_TD`, (T, D), of the dtype of `x_TD`. A token without routes gets zero.

    Raises:
        TypeError: A dtype is not one of those above.
        ValueError: Shapes or devices do not match, `impl` cannot run here, or an id is out of range
            or twice in a token. Ids are checked on CPU tensors only; on a GPU, where the check
            would wait for the device, such ids give wrong results.

    Note:
        Differentiable in the tokens, the weights and both stacks; a route with id -1 adds nothing
        and its weight gets a gradient of exactly zero. Bitwise deterministic, forward and backward:
        rows are gathered and summed in slot order, in float32 or wider, without atomics. No host
        sync on a GPU unless the reference product runs.

        Held for backward beyond the inputs, a route: `2 D + 4 H` elements (the gathered rows, the
        hidden layers, the experts' outputs).
    """
    check_rows("x_TD", x_TD)
    E, D, H = check_experts(w_gate_up_E2HD, w_down_EDH, "x_TD", x_TD)
    check_routes(expert_ids_TK, weights_TK, E, x_TD)
    chosen = pick(impl, x_TD, E, D, H)
    K = expert_ids_TK.shape[1]
    order = sort_routes(expert_ids_TK, E)
    token_R, row_TK = order.route_R // K, order.row_N.view(-1, K)

    rows_RD = gather_rows(x_TD, token_R, row_TK)
    # A route has one row, so its weight travels as a token of width 1 with a single slot.
    row_weights_R1 = gather_rows(weights_TK.reshape(-1, 1), order.route_R, order.row_N[:, None])
    y_RD = swiglu_experts(
        rows_RD,
        w_gate_up_E2HD,
        w_down_EDH,
        order.offsets_E,
        row_weights_R=row_weights_R1[:, 0],
        impl=chosen,
    )
    return collect_rows(y_RD, token_R, row_TK)
