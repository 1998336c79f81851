"""From tokens to rows sorted by expert and back, without atomics in either direction.

A token that names K experts becomes K rows, one a route. Two maps describe where they go:

    token_R[r]     the token whose copy is row r           gather:  x_R[r] = x_T[token_R[r]]
    row_TK[t, k]   the row that route k of token t became  collect: y_T[t] = sum_k y_R[row_TK[t, k]]

The usual backward of a gather adds into the tokens with atomics, in whatever order the threads
arrive. Here each operator's backward is the other operator: a collect that adds the K rows of a
token in slot order. So outputs and gradients are bitwise the same in every run, and what a token
gets does not depend on the other tokens.

Shapes: T tokens, K experts a token, N = T*K routes, E experts, R = N rows, D width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class RouteOrder(NamedTuple):
    """Where the routes of a batch lie once they are sorted by expert; indices are int64."""

    offsets_E: Tensor
    """Ends of the experts' rows, (E,) int32; the routes with id -1 lie past the last."""
    route_R: Tensor
    """The route `t * K + k` in each row, (R,)."""
    row_N: Tensor
    """The row of each route, (N,): the inverse of `route_R`."""


def sort_routes(expert_ids_TK: Tensor, num_experts: int) -> RouteOrder:
    """Order the routes by (expert, token, slot), those without an expert last; no host sync."""
    ids_N = expert_ids_TK.reshape(-1).long()
    ids_N = torch.where(ids_N < 0, num_experts, ids_N)
    sorted_R, route_R = ids_N.sort(stable=True)
    experts_E = torch.arange(num_experts, device=ids_N.device)
    offsets_E = torch.searchsorted(sorted_R, experts_E, right=True, out_int32=True)
    rows_R = torch.arange(len(route_R), device=ids_N.device)
    row_N = torch.empty_like(route_R).scatter_(0, route_R, rows_R)
    return RouteOrder(offsets_E, route_R, row_N)


@torch.library.custom_op("olmo_experts_gemm::gather_rows", mutates_args=())
def gather_rows(x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
    """Copy each token to its rows, (R, D)."""
    return x_TD.index_select(0, token_R)


@torch.library.custom_op("olmo_experts_gemm::collect_rows", mutates_args=())
def collect_rows(y_RD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
    """Add the K rows of each token in slot order, in float32 or wider, (T, D)."""
    total_TD = y_RD.index_select(0, row_TK[:, 0])
    if row_TK.shape[1] == 1:
        return total_TD
    total_TD = total_TD.to(torch.promote_types(y_RD.dtype, torch.float32))
    for row_T in row_TK[:, 1:].unbind(dim=1):
        total_TD += y_RD.index_select(0, row_T)
    return total_TD.to(y_RD.dtype)


@gather_rows.register_fake
def _(x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
    return x_TD.new_empty(token_R.shape[0], x_TD.shape[1])


@collect_rows.register_fake
def _(y_RD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
    return y_RD.new_empty(row_TK.shape[0], y_RD.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, token_R, row_TK = inputs
    ctx.save_for_backward(token_R, row_TK)


def _gather_backward(ctx: Any, g_RD: Tensor) -> tuple[Tensor | None, ...]:
    return collect_rows(g_RD, *ctx.saved_tensors), None, None


def _collect_backward(ctx: Any, g_TD: Tensor) -> tuple[Tensor | None, ...]:
    return gather_rows(g_TD, *ctx.saved_tensors), None, None


gather_rows.register_autograd(_gather_backward, setup_context=_save)
collect_rows.register_autograd(_collect_backward, setup_context=_save)
