"""The order in which the kernels of the expert MLP run, forward and backward.

    forward    hidden, a = up_product(x)     rows = row_product(a)      y = collect(rows)
    backward   d_hidden, s a, ds = down_gradient(dy)
               d w_down    = weight_gradient(dy, s a)
               d x         = collect(row_product(d_hidden))
               d w_gate_up = weight_gradient(d_hidden, x)

Rows that lie ready (`route_R` is None) need no collect. Tokens are gathered by the loads of each
product, or where that is slower copied in the order of the rows first. The tokens and `hidden` are
all that is kept between the two; every other tensor of rows is freed as soon as the next one is
made of it.

The gradients of the stacks and biases may wait: backward then leaves, for each, the same kernel as
a function of what it reads, `dy` and `s a`, or `d_hidden` and `x`.

Shapes: T tokens, K routes a token, R rows, E experts, D model width, H expert hidden width.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ._deferral import Later, Work
from ._dense import dense, is_dense
from ._triton_product import launching_on

if TYPE_CHECKING:
    from ._triton.tile_map import TileMap


class Rows(NamedTuple):
    """Whose the rows are and where they come from."""

    offsets_E: Tensor
    """Ends of the experts' rows, int32."""
    weights: Tensor | None
    """A float32 factor a route, (T, K), or a row, (R,)."""
    route_R: Tensor | None
    """The route in each row, int32, or None for rows that lie ready."""
    row_TK: Tensor | None
    """The row of each route, int32; -1 for none."""
    top_k: int
    """Routes a token."""
    activation: str

    def dense(self) -> "Rows":
        """The same, laid out as the kernels read it."""
        weights, route_R, row_TK = self.weights, self.route_R, self.row_TK
        return self._replace(
            offsets_E=dense(self.offsets_E),
            weights=None if weights is None else dense(weights),
            route_R=None if route_R is None else dense(route_R),
            row_TK=None if row_TK is None else dense(row_TK),
        )

    def of(self, x: Tensor) -> int:
        """How many rows `x` becomes."""
        return (x if self.route_R is None else self.route_R).shape[0]


class Needs(NamedTuple):
    """Which gradients somebody asks for."""

    x: bool
    w_gate_up: bool
    w_down: bool
    b_gate_up: bool
    b_down: bool
    weights: bool


class Gradients(NamedTuple):
    """One an input; of no elements where nobody asks for it, or where it went into a buffer."""

    x: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    b_gate_up: Tensor
    b_down: Tensor
    weights: Tensor


def sort_routes(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """`offsets_E`, `route_R` and `row_TK`, all int32."""
    from ._triton import sort_routes as kernels

    if expert_ids_TK.numel() == 0:
        made = expert_ids_TK.new_zeros(num_experts, dtype=torch.int32)
        return made, made.new_empty(0), made.new_empty(expert_ids_TK.shape)
    with launching_on(expert_ids_TK.device):
        return kernels.sort_routes(expert_ids_TK, num_experts)


def forward(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    b_gate_up: Tensor | None,
    b_down: Tensor | None,
    rows: Rows,
    save_hidden: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output, shaped as `x`, and `hidden`, of no rows unless it is saved."""
    from ._triton.collect import collect
    from ._triton.expert_sums import add_to_rows
    from ._triton.row_product import row_product
    from ._triton.tile_map import make_tile_map
    from ._triton.tiling import tile_rows
    from ._triton.up_product import up_product

    if rows.of(x) == 0:
        return x.new_zeros(x.shape), x.new_empty(0, w_gate_up.shape[1])
    rows, x, w_down = rows.dense(), dense(x), dense(w_down)
    with launching_on(x.device):
        tiles = make_tile_map(rows.offsets_E, rows.of(x), tile_rows(x))
        x, laid = _lay_out(x, w_down, rows)
        a_RH, hidden = up_product(
            x,
            dense(w_gate_up),
            None if b_gate_up is None else dense(b_gate_up),
            rows.offsets_E,
            route_R=laid.route_R,
            weights=laid.weights,
            top_k=rows.top_k,
            activation=rows.activation,
            save_hidden=save_hidden,
            tiles=tiles,
        )
        del x
        y_RD = row_product(a_RH, w_down, rows.offsets_E, zero_tail=rows.row_TK is None, tiles=tiles)
        del a_RH
        if b_down is not None:
            add_to_rows(
                y_RD, dense(b_down), rows.offsets_E, route_R=laid.route_R, weights=laid.weights
            )
        return (y_RD if rows.row_TK is None else collect(y_RD, rows.row_TK)), hidden


def backward(
    dy: Tensor,
    x: Tensor,
    hidden: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    b_down: Tensor | None,
    rows: Rows,
    needs: Needs,
    into: tuple[Tensor, Tensor] | None,
    later: Later | None = None,
) -> Gradients:
    """Return the gradients that `needs` asks for; those of the stacks go `into` buffers if given.

    Args:
        dy: The gradient of the output, shaped as `x`.
        x: What forward was given.
        hidden: What forward saved.
        w_gate_up: As in forward.
        w_down: As in forward.
        b_down: As in forward.
        rows: As in forward.
        needs: What to make.
        into: Float32 buffers for the gradients of `w_gate_up` and `w_down`.
        later: Weights that wait. What makes their gradients is left there, and reads tensors that
            are given here.
    """
    from ._triton.expert_sums import sum_rows
    from ._triton.tile_map import make_tile_map
    from ._triton.tiling import tile_rows

    nothing = empty_gradients(x, w_gate_up, w_down, rows, Needs(*[False] * 6), into is not None)
    if rows.of(x) == 0:
        full = empty_gradients(x, w_gate_up, w_down, rows, needs, into is not None)
        made = {name: gradient.zero_() for name, gradient in full._asdict().items()}
        if later is not None:
            for name in later.weights:
                later.leave(name, partial(_zeros, made[name]))
        return Gradients(**made)
    results = _Results(later, x.device)
    rows, dy, x, hidden = rows.dense(), dense(dy), dense(x), dense(hidden)
    gather = {"route_R": rows.route_R, "top_k": rows.top_k}
    with launching_on(x.device):
        if needs.b_down:
            results.make("b_down", sum_rows, dy, rows.offsets_E, weights=rows.weights, **gather)
        if any((needs.x, needs.w_gate_up, needs.w_down, needs.b_gate_up, needs.weights)):
            tiles = make_tile_map(rows.offsets_E, rows.of(x), tile_rows(x))
            d_hidden = _down(dy, hidden, w_down, b_down, rows, tiles, needs, into, results)
            if needs.x:
                results.make("x", _rows_gradient, d_hidden, w_gate_up, rows, tiles)
            if needs.w_gate_up:
                buffer = None if into is None else into[0]
                unweighted = rows._replace(weights=None)
                results.make("w_gate_up", _up_gradient, d_hidden, x, w_down, unweighted, buffer)
            if needs.b_gate_up:
                results.make("b_gate_up", sum_rows, d_hidden, rows.offsets_E)
    return nothing._replace(**results.made)


class _Results:
    """Gradients as they are made, and functions that make those that wait.

    Args:
        later: Those that wait.
        device: Where they are made.
    """

    def __init__(self, later: Later | None, device: torch.device) -> None:
        self.made: dict[str, Tensor] = {}
        self._later = later
        self._device = device

    def waits(self, name: str) -> bool:
        """Whether this gradient is left for later."""
        return self._later is not None and name in self._later.weights

    def make(
        self, name: str, function: Callable[..., Tensor | None], *given: Any, **kw: Any
    ) -> None:
        """Call a function for a gradient, or leave the call for later."""
        if self._later is not None and self.waits(name):
            self._later.leave(name, partial(self._launch, partial(function, *given, **kw)))
        elif (gradient := function(*given, **kw)) is not None:
            self.made[name] = gradient

    def _launch(self, work: Work) -> Tensor | None:
        with launching_on(self._device):
            return work()


def _down(
    dy: Tensor,
    hidden: Tensor,
    w_down: Tensor,
    b_down: Tensor | None,
    rows: Rows,
    tiles: "TileMap",
    needs: Needs,
    into: tuple[Tensor, Tensor] | None,
    results: _Results,
) -> Tensor:
    """Return `d hidden`, and make the gradients of `w_down` and of the weights on the way."""
    from ._triton.down_gradient import down_gradient

    laid_dy, laid = _lay_out(dy, w_down, rows)
    d_hidden, a_RH, ds_PR = down_gradient(
        laid_dy,
        dense(w_down),
        hidden,
        laid.offsets_E,
        route_R=laid.route_R,
        weights=laid.weights,
        top_k=laid.top_k,
        activation=laid.activation,
        tiles=tiles,
    )
    buffer = None if into is None else into[1]
    if needs.w_down and results.waits("w_down"):
        # A copy in the order of the rows is K times as large, and made again.
        unweighted = rows._replace(weights=None)
        results.make("w_down", _down_gradient, dy, a_RH, w_down, unweighted, buffer)
    elif needs.w_down:
        results.make("w_down", _stack_gradient, laid_dy, a_RH, laid, "left", buffer)
    if needs.weights:
        results.make("weights", _weights_gradient, ds_PR, laid_dy, b_down, laid)
    return d_hidden


def _down_gradient(
    dy: Tensor, a_RH: Tensor, w_down: Tensor, rows: Rows, into: Tensor | None
) -> Tensor | None:
    laid_dy, laid = _lay_out(dy, w_down, rows)
    return _stack_gradient(laid_dy, a_RH, laid, "left", into)


def _up_gradient(
    d_hidden: Tensor, x: Tensor, w_down: Tensor, rows: Rows, into: Tensor | None
) -> Tensor | None:
    laid_x, laid = _lay_out(x, w_down, rows)
    return _stack_gradient(d_hidden, laid_x, laid, "right", into)


def _zeros(gradient: Tensor) -> Tensor | None:
    return gradient if gradient.numel() else None  # of no elements where it went into a buffer


def _lay_out(x: Tensor, w_down: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
    """Tokens as they are; or their rows, and the weights of these, where a copy pays."""
    from ._triton.copy_rows import copy_rows
    from ._triton.tiling import copies_rows

    if rows.row_TK is None or not copies_rows(x, w_down.shape[2]):
        return x, rows
    x_RD, weights_R = copy_rows(x, rows.weights, rows.row_TK, rows.of(x))
    return x_RD, rows._replace(weights=weights_R, route_R=None)


def _stack_gradient(
    left: Tensor, right: Tensor, rows: Rows, gather: str, into: Tensor | None
) -> Tensor | None:
    """`dw[e] = left_e.T @ right_e`, returned, or added to a buffer."""
    from ._triton.weight_gradient import weight_gradient

    options = {"top_k": rows.top_k, "route_R": rows.route_R, "gather": gather}
    if rows.route_R is None:
        options["gather"] = "none"
    if into is None:
        return weight_gradient(left, right, rows.offsets_E, **options)
    if is_dense(into):
        weight_gradient(left, right, rows.offsets_E, into=into, **options)
    else:  # not aligned as a descriptor needs it
        into.add_(weight_gradient(left, right, rows.offsets_E, **options))
    return None


def _rows_gradient(d_hidden: Tensor, w_gate_up: Tensor, rows: Rows, tiles: "TileMap") -> Tensor:
    from ._triton.collect import collect
    from ._triton.row_product import row_product

    dx_RD = row_product(
        d_hidden,
        dense(w_gate_up),
        rows.offsets_E,
        transposed=True,
        zero_tail=rows.row_TK is None,
        tiles=tiles,
    )
    return dx_RD if rows.row_TK is None else collect(dx_RD, rows.row_TK)


def _weights_gradient(ds_PR: Tensor, dy: Tensor, b_down: Tensor | None, rows: Rows) -> Tensor:
    """Shaped as the weights; exactly zero where there is no route, or past the last offset."""
    from ._triton.collect import collect_weight_gradient
    from ._triton.expert_sums import dot_rows

    if b_down is not None:
        dots_R = dot_rows(
            dy,
            dense(b_down),
            rows.offsets_E,
            ds_PR.shape[1],
            route_R=rows.route_R,
            top_k=rows.top_k,
        )
        ds_PR = torch.cat([ds_PR, dots_R[None]])
    if rows.row_TK is not None:
        return collect_weight_gradient(ds_PR, rows.row_TK)
    rows_R = torch.arange(ds_PR.shape[1], device=ds_PR.device)
    return torch.where(rows_R < rows.offsets_E[-1], ds_PR.sum(0), 0.0)


def empty_gradients(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, rows: Rows, needs: Needs, into: bool
) -> Gradients:
    """Unwritten tensors of the shapes and dtypes of what `backward` returns."""
    stacks = not into
    return Gradients(
        _empty(x.shape, needs.x, x),
        _empty(w_gate_up.shape, needs.w_gate_up and stacks, x),
        _empty(w_down.shape, needs.w_down and stacks, x),
        _empty(w_gate_up.shape[:2], needs.b_gate_up, x),
        _empty(w_down.shape[:2], needs.b_down, x),
        x.new_empty(0, dtype=torch.float32)
        if rows.weights is None
        else _empty(rows.weights.shape, needs.weights, rows.weights),
    )


def _empty(shape: torch.Size, asked: bool, like: Tensor) -> Tensor:
    return like.new_empty(shape if asked else (0,))
