"""A mixture of experts from tokens to tokens, on one device.

    y[t] = sum over k of  weights[t, k] * f_e(x[t]),   e = expert_ids[t, k]

with the MLP `f_e` of `swiglu_experts`. The routes are sorted by (expert, token, slot), each expert
runs on its rows, and the rows of a token are added in slot order.

Shapes: T tokens, K experts a token, N = T*K routes, E experts, D model width, H hidden width.
"""

from torch import Tensor

from ._activation import Activation
from ._checks import check_routes, check_rows, refuse_forward_mode
from ._deferral import Defer, check_defer
from ._expert_mlp import (
    GroupedMatmul,
    Stacks,
    check_one_product,
    check_stacks,
    run_fused,
    run_products,
)
from ._fused_mlp import sort_routes_op
from ._grouped_mm import Impl, pick
from ._packing import SavedActivationPacker, refuse_compilation
from ._routes import collect_rows, gather_rows, sort_routes


def moe_mlp(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    w_gate_up_E2HD: Tensor,
    w_down_EDH: Tensor,
    *,
    activation: Activation = "swiglu",
    b_gate_up_E2H: Tensor | None = None,
    b_down_ED: Tensor | None = None,
    main_grads: tuple[Tensor, Tensor] | None = None,
    pack: SavedActivationPacker | None = None,
    defer: Defer | None = None,
    impl: Impl = "auto",
    matmul: GroupedMatmul | None = None,
) -> Tensor:
    """Send each token to its experts and return the weighted sum of what they make of it.

    Args:
        x_TD: Tokens, (T, D); float16, bfloat16, float32 or float64. T may be 0.
        expert_ids_TK: The experts of each token, (T, K) int64 or int32, in [0, E), none twice in
            one token; -1 is no route.
        weights_TK: The weight of each route, (T, K), any float dtype; not read where the id is -1.
            `"triton"` converts them to float32, float64 too.
        w_gate_up_E2HD: Gate rows first, then up rows, (E, 2H, D); (E, H, D) for `"relu_squared"`;
            the dtype of `x_TD`.
        w_down_EDH: (E, D, H); the dtype of `x_TD`.
        activation: As for `swiglu_experts`.
        b_gate_up_E2H: As for `swiglu_experts`.
        b_down_ED: As for `swiglu_experts`.
        main_grads: As for `swiglu_experts`.
        pack: As for `swiglu_experts`; what it is given is the tokens `x_TD` of `"triton"`, and the
            gathered rows of the other two, besides the pre-activations.
        defer: As for `swiglu_experts`.
        impl: Which grouped product, as for `grouped_mm`; `"triton"` is the fused MLP, which gathers
            the tokens in its loads. It needs D and H that are multiples of 8, and T*K below 2^30.
        matmul: As for `swiglu_experts`.

    Returns:
        `y_TD`, (T, D), of the dtype of `x_TD`. A token without routes gets zero.

    Raises:
        TypeError: A dtype is not one of those above, or `defer` is no function.
        ValueError: Shapes or devices do not match, `activation` is unknown, `impl` cannot run here,
            `matmul` comes together with `impl`, `main_grads`, `pack` or `defer`, or an id is out of
            range or twice in a token. Ids are checked on CPU tensors only, and not in a compiled
            call. On a GPU, where the check would wait for the device, an id of E or more fails an
            assertion on the device by `"triton"`, which ends the process's use of the device; by
            the others it is not seen, and ids below -1 or twice in a token are seen by none.
        NotImplementedError: As for `swiglu_experts`.
        RuntimeError: As for `swiglu_experts`.

    Note:
        Differentiable in the tokens, the weights, both stacks and both biases, once by `"triton"`
        and to any order by the others; a route with id -1 adds nothing and its weight gets a
        gradient of exactly zero. Bitwise deterministic, forward and backward: rows are gathered and
        summed in slot order, in float32 or wider, without atomics. No host sync on a GPU unless the
        reference product runs.

        Held for backward beyond the inputs, for the SwiGLU in 16 bits: by `"triton"` `4 H` bytes, 8
        more of maps and 4 of a weight that is not float32 a route, and 4 bytes an expert; by the
        others `2 (2 D + 4 H)` bytes a route (the gathered rows, the hidden layers, the experts'
        outputs), and int64 maps. The tokens are an input: `2 D` bytes each, unless they are packed.

        Held from backward until deferred gradients are computed: by `"triton"` `6 H` bytes a route,
        the maps, and of a token itself and the gradient of its output `4 D` bytes; by the others
        `2 (2 D + 3 H)` bytes a route.
    """
    refuse_compilation(pack, defer)
    check_defer(defer)
    check_one_product(impl, matmul, main_grads=main_grads, pack=pack, defer=defer)
    check_rows("x_TD", x_TD)
    stacks = Stacks.of(w_gate_up_E2HD, w_down_EDH, b_gate_up_E2H, b_down_ED, main_grads)
    E, D, H = check_stacks(stacks, activation, "x_TD", x_TD)
    check_routes(expert_ids_TK, weights_TK, E, x_TD)
    refuse_forward_mode(x_TD, weights_TK, *stacks)
    chosen = pick(impl, x_TD, expert_ids_TK.numel(), E, D, H)
    K = expert_ids_TK.shape[1]
    if chosen == "triton" and matmul is None:
        maps = sort_routes_op(expert_ids_TK, E)
        return run_fused(x_TD, stacks, weights_TK, maps, K, activation, pack, defer)

    order = sort_routes(expert_ids_TK, E)
    token_R, row_TK = order.route_R // K, order.row_N.view(-1, K)
    rows_RD = gather_rows(x_TD, token_R, row_TK)
    # A route has one row, so its weight travels as a token of width 1 with a single slot.
    row_weights_R1 = gather_rows(weights_TK.reshape(-1, 1), order.route_R, order.row_N[:, None])
    y_RD = run_products(
        rows_RD,
        stacks,
        row_weights_R1[:, 0],
        order.offsets_E,
        activation,
        pack,
        defer,
        chosen,
        matmul,
    )
    return collect_rows(y_RD, token_R, row_TK)
