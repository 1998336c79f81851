"""Dispatch and combine as autograd sees them: each is the backward of the other.

A collective in a backward pass is safe only if every rank reaches it. Autograd leaves out what does
not lead to a leaf, and it decides that rank by rank, so three rules hold here:

- Either backward does all its exchanges, whatever this rank itself needs a gradient for.
- `dispatch` puts a `link` into the handle, an output of its autograd node, and `combine` takes it
  in. The result of `combine` thus leads to `dispatch` even on a rank whose experts had no rows and
  returned a fresh tensor.
- A rank whose tokens need no gradient makes them need one (`need_gradient`).

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


class Exchange(Protocol):
    """The way of one dispatch between the ranks of tokens and the ranks of experts.

    Where there are several ranks each method is collective: all of them call it, in one order.

    Attributes:
        leases: What holds the memory of the rows that arrive, as long as anything lives of what the
            autograd node of the dispatch saves. The handle takes them over until `combine`.
    """

    leases: tuple[Tensor, ...]

    def send_tokens(self, x_TD: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Bring tokens and weights to the experts: rows (R, D) and row weights (R)."""
        ...

    def return_gradients(
        self, grad_rows_RD: Tensor, grad_row_weights_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Bring the gradients of both home: (T, D) and (T, K)."""
        ...

    def sum_results(self, y_RD: Tensor) -> Tensor:
        """Bring the results home and add up each token's: (T, D)."""
        ...

    def send_gradients(self, grad_y_TD: Tensor) -> Tensor:
        """Bring the gradients of the sums to the experts: (R, D)."""
        ...


@dataclass(slots=True, eq=False)
class Handle:
    """The way home of one dispatch.

    Attributes:
        exchange: The way between the ranks.
        form: Rows, width and dtype of what `combine` must be given.
        link: 0-d, ties `combine` to its `dispatch` in the autograd graph.
        leases: Those of the exchange, until `combine`.
    """

    exchange: Exchange
    form: tuple[int, int, torch.dtype]
    link: Tensor
    leases: tuple[Tensor, ...]


def need_gradient(x_TD: Tensor, weights_TK: Tensor) -> Tensor:
    """Return tokens that need a gradient if neither argument does, so that a backward takes part.

    Under `torch.no_grad()`, where there is none, they are the tokens themselves.
    """
    if torch.is_grad_enabled() and not (x_TD.requires_grad or weights_TK.requires_grad):
        return x_TD.detach().requires_grad_()
    return x_TD


def dispatch_rows(
    x_TD: Tensor, weights_TK: Tensor, exchange: Exchange
) -> tuple[Tensor, Tensor, Handle]:
    """Send tokens and weights: their rows, the weights of the rows, and the way home."""
    rows_RD, row_weights_R, link = _Dispatch.apply(x_TD, weights_TK, exchange)
    leases, exchange.leases = exchange.leases, ()
    return rows_RD, row_weights_R, Handle(exchange, (*rows_RD.shape, rows_RD.dtype), link, leases)


def combine_rows(y_RD: Tensor, handle: object) -> Tensor:
    """Send rows home and sum them for each token."""
    if not isinstance(handle, Handle):
        raise TypeError(f"`handle` must come from `dispatch`, got {type(handle).__name__}.")
    check_results(y_RD, *handle.form)
    y_TD = _Combine.apply(y_RD, handle.link, handle.exchange)
    handle.leases = ()
    return y_TD


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, exchange: Exchange) -> Any:
        ctx.exchange = exchange
        rows_RD, row_weights_R = exchange.send_tokens(x_TD, weights_TK)
        link = x_TD.new_empty(())  # nobody reads it, and a fill is a launch
        ctx.save_for_backward(link, *exchange.leases)
        return rows_RD, row_weights_R, link

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - hidden by the decorator
        ctx: Any, *grads: Tensor
    ) -> Any:
        grad_rows_RD, grad_row_weights_R, _ = grads
        _saved = ctx.saved_tensors  # held until the gradients are on their way
        return *ctx.exchange.return_gradients(grad_rows_RD, grad_row_weights_R), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, link: Tensor, exchange: Exchange) -> Any:
        ctx.exchange = exchange
        ctx.save_for_backward(link)
        return exchange.sum_results(y_RD)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - hidden by the decorator
        ctx: Any, *grads: Tensor
    ) -> Any:
        (grad_y_TD,) = grads
        (_link,) = ctx.saved_tensors
        return ctx.exchange.send_gradients(grad_y_TD), grad_y_TD.new_zeros(()), None
