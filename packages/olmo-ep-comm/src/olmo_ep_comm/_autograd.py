"""Dispatch and combine as autograd sees them: each is the backward of the other.

A collective in a backward pass is safe only if every rank reaches it. Autograd leaves out what does
not lead to a leaf, and it decides that rank by rank, so three rules hold here:

- Either backward does all its exchanges, whatever this rank itself needs a gradient for.
- `dispatch` puts a `link` into the handle, an output of its autograd node, and `combine` takes it
  in. The result of `combine` thus leads to `dispatch` even on a rank whose experts had no rows and
  returned a fresh tensor.
- A rank whose tokens need no gradient makes them need one (`AllToAllDispatcher.dispatch`).

Activation checkpointing (`use_reentrant=False`) adds exchanges to the backward pass: those of the
forward, run again when a saved tensor is first asked for. A rank without rows may save nothing
else, so both nodes here save the `link` and ask for it before their own exchanges.

The order is the same everywhere too: autograd runs the nodes newest first, so that the exchanges of
a backward pass are those of the forward pass in reverse, also when several dispatches are alive.

What a forward returns must be a tensor of its own: `torch.compile` gives a gradient of 0 to one
that was written in place (`+=`, `out=`) or came out of a cast to the dtype that it had already.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._checks import check_results
from ._interface import Dispatched
from .reference import Routes, gather_rows, gather_weights, return_weights, sum_rows


class Wire(Protocol):
    """Carries rows between the ranks of tokens and the ranks of experts."""

    def send(self, values: Tensor) -> Tensor:
        """Carry values of this rank's routes, in row order, to the experts: (R_here, ...)."""
        ...

    def send_back(self, values: Tensor) -> Tensor:
        """Undo `send`: carry values of the experts' rows to their tokens' ranks."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """The way home of one dispatch.

    Attributes:
        routes: The routes of this rank's tokens.
        wire: The way between the ranks.
        form: Rows, width and dtype of what `combine` must be given.
        link: 0-d, ties `combine` to its `dispatch` in the autograd graph.
    """

    routes: Routes
    wire: Wire
    form: tuple[int, int, torch.dtype]
    link: Tensor


def dispatch_rows(
    x_TD: Tensor, weights_TK: Tensor, routes: Routes, wire: Wire, offsets_E: Tensor
) -> Dispatched:
    """Send tokens and weights along `routes`; `offsets_E` are the ends of the rows that arrive."""
    rows_RD, row_weights_R, link = _Dispatch.apply(x_TD, weights_TK, routes, wire)
    form = (*rows_RD.shape, rows_RD.dtype)
    num_dropped = torch.zeros((), dtype=torch.int64, device=x_TD.device)
    return Dispatched(
        rows_RD, row_weights_R, offsets_E, num_dropped, Handle(routes, wire, form, link)
    )


def combine_rows(y_RD: Tensor, handle: object) -> Tensor:
    """Send rows home and sum them for each token."""
    if not isinstance(handle, Handle):
        raise TypeError(f"`handle` must come from `dispatch`, got {type(handle).__name__}.")
    check_results(y_RD, *handle.form)
    return _Combine.apply(y_RD, handle.link, handle.routes, handle.wire)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, routes: Routes, wire: Wire) -> Any:
        ctx.routes, ctx.wire = routes, wire
        rows_RD = wire.send(gather_rows(x_TD, routes))
        row_weights_R = wire.send(gather_weights(weights_TK, routes))
        link = x_TD.new_zeros(())
        ctx.save_for_backward(link)
        return rows_RD, row_weights_R, link

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - hidden by the decorator
        ctx: Any, *grads: Tensor
    ) -> Any:
        grad_rows_RD, grad_row_weights_R, _ = grads
        (_link,) = ctx.saved_tensors
        grad_x_TD = sum_rows(ctx.wire.send_back(grad_rows_RD), ctx.routes)
        grad_weights_TK = return_weights(ctx.wire.send_back(grad_row_weights_R), ctx.routes)
        return grad_x_TD, grad_weights_TK, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, link: Tensor, routes: Routes, wire: Wire) -> Any:
        ctx.routes, ctx.wire = routes, wire
        ctx.save_for_backward(link)
        return sum_rows(wire.send_back(y_RD), routes)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - hidden by the decorator
        ctx: Any, *grads: Tensor
    ) -> Any:
        (grad_y_TD,) = grads
        (_link,) = ctx.saved_tensors
        grad_y_RD = ctx.wire.send(gather_rows(grad_y_TD, ctx.routes))
        return grad_y_RD, grad_y_TD.new_zeros(()), None, None
