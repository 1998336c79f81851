"""The definition of correct: which row a route gets, and what comes back.

A route is one (token, slot) pair with an expert. Sorting the routes by expert, stably, gives each
its row; dispatch copies tokens to rows, combine sums rows into tokens, each the other's transpose:

    dispatch   rows[r] = x[token(r)]                    rows = P x
    combine    y[t] = sum_k rows[row(t, k)]             y = P^T rows

so the backward of one is the other. The mixture of experts (GShard, arXiv:2006.16668, equation 3)
`y_t = sum_e G_te FFN_e(x_t)` is `combine(weight * FFN(dispatch(x)))`: the weights travel as rows
too and the expert side multiplies by them.

Everything here is plain torch, works in float64, reads nothing back to the host and uses no
atomics. Combine gathers a token's rows and adds them in slot order: it is bitwise repeatable.

Shapes: T tokens, K slots a token, N = T*K routes, E experts, R rows, D model width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Where each route's row is and where each row came from.

    Attributes:
        rows_TK: Row of each route, int64; -1 where the token has no route in this slot.
        route_R: Route of each row, `token * K + slot`, int64. Entries past `offsets_E[-1]`, if any,
            belong to slots without a route.
        offsets_E: Inclusive end of each expert's rows, int32.
    """

    rows_TK: Tensor
    route_R: Tensor
    offsets_E: Tensor

    def keep_rows(self, num_rows: int) -> "Routes":
        """Return the same routes with `route_R` cut to its first `num_rows` entries."""
        return Routes(self.rows_TK, self.route_R[:num_rows], self.offsets_E)


def is_route(expert_ids_TK: Tensor, num_experts: int) -> Tensor:
    """Return a bool tensor (T, K): whether the id names one of `num_experts` experts."""
    return (expert_ids_TK >= 0) & (expert_ids_TK < num_experts)


def sort_routes(expert_ids_TK: Tensor, num_experts: int) -> Routes:
    """Give every route its row: expert by expert, then by token, then by slot.

    Args:
        expert_ids_TK: Expert of each slot, int32 or int64; anything outside [0, `num_experts`) is
            no route and gets no row.
        num_experts: Number of experts, at least 1.

    Returns:
        The routes, with `route_R` of all N entries: those without a route come last.
    """
    expert_N = expert_ids_TK.flatten()
    has_row_N = is_route(expert_N, num_experts)
    sorted_N, route_N = torch.where(has_row_N, expert_N, num_experts).sort(stable=True)
    expert_E = torch.arange(num_experts, dtype=sorted_N.dtype, device=sorted_N.device)
    offsets_E = torch.searchsorted(sorted_N, expert_E, right=True, out_int32=True)
    row_N = torch.empty_like(route_N)
    row_N[route_N] = torch.arange(route_N.numel(), device=route_N.device)
    rows_TK = torch.where(has_row_N, row_N, -1).view(expert_ids_TK.shape)
    return Routes(rows_TK, route_N, offsets_E)


def gather_rows(x_TD: Tensor, routes: Routes) -> Tensor:
    """Return rows (R, D): the token of each row."""
    num_slots = routes.rows_TK.shape[1]
    return x_TD.index_select(0, routes.route_R // num_slots)


def gather_weights(weights_TK: Tensor, routes: Routes) -> Tensor:
    """Return row weights (R): the weight of each row's route."""
    return weights_TK.flatten().index_select(0, routes.route_R)


def sum_rows(y_RD: Tensor, routes: Routes) -> Tensor:
    """Return (T, D): each token's rows added in slot order, exactly 0 for a token without routes.

    The sum of bfloat16 rows is carried in float32 and rounded once.
    """
    num_tokens, num_slots = routes.rows_TK.shape
    sum_dtype = torch.promote_types(y_RD.dtype, torch.float32)
    y_TD = torch.zeros(num_tokens, y_RD.shape[1], dtype=sum_dtype, device=y_RD.device)
    for slot in range(num_slots):
        y_TD += _take_or_zero(y_RD, routes.rows_TK[:, slot])
    return y_TD.to(y_RD.dtype, copy=True)  # fresh: see `_autograd`


def return_weights(values_R: Tensor, routes: Routes) -> Tensor:
    """Return (T, K): the value of each route's row, exactly 0 where there is no route."""
    return _take_or_zero(values_R, routes.rows_TK)


def _take_or_zero(values: Tensor, index: Tensor) -> Tensor:
    """Return `values[index]`, and 0 where `index` is -1, whatever the undefined rows hold."""
    shape = (*index.shape, *values.shape[1:])
    if values.shape[0] == 0:
        return values.new_zeros(shape)
    absent = (index < 0).view(*index.shape, *(1 for _ in values.shape[1:]))
    return values[index.clamp(min=0)].masked_fill(absent, 0)
