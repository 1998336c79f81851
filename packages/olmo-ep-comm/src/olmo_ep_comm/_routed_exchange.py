"""An exchange along sorted routes: one row for each route, whatever carries it."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ._pair_codec import PackedRows, PairCodec, pack_rows, unpack_rows
from .reference import Routes, gather_rows, gather_weights, return_weights, sum_rows


class Wire(Protocol):
    """Carries rows between the ranks of tokens and the ranks of experts."""

    def send(self, values: Tensor) -> Tensor:
        """Carry values of this rank's routes, in row order, to the experts: (R_here, ...)."""
        ...

    def send_back(self, values: Tensor) -> Tensor:
        """Undo `send`: carry values of the experts' rows to their tokens' ranks."""
        ...


@dataclass(slots=True, eq=False)
class RoutedExchange:
    """See `Exchange`.

    Attributes:
        routes: The routes of this rank's tokens.
        wire: The way between the ranks.
        codec: How the rows of tokens travel, None for as they are.
        backward_codec: How the rows of gradients travel to the experts.
        packed: The tokens encoded, if they are; after `send_tokens` the rows that arrived.
        leases: None: the rows are memory of their own.
    """

    routes: Routes
    wire: Wire
    codec: PairCodec | None = None
    backward_codec: PairCodec | None = None
    packed: PackedRows | None = None
    leases: tuple[Tensor, ...] = ()

    def send_tokens(self, x_TD: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Bring tokens and weights to the experts."""
        if self.codec is None or self.packed is None:
            rows_RD = self.wire.send(gather_rows(x_TD, self.routes))
        else:
            self.packed = self._send_packed(self.packed)
            rows_RD = unpack_rows(self.codec, self.packed, x_TD.dtype)
        return rows_RD, self.wire.send(gather_weights(weights_TK, self.routes))

    def return_gradients(
        self, grad_rows_RD: Tensor, grad_row_weights_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Bring the gradients of both home."""
        grad_x_TD = sum_rows(self.wire.send_back(grad_rows_RD), self.routes)
        grad_weights_TK = return_weights(self.wire.send_back(grad_row_weights_R), self.routes)
        return grad_x_TD, grad_weights_TK

    def sum_results(self, y_RD: Tensor) -> Tensor:
        """Bring the results home and add up each token's."""
        return sum_rows(self.wire.send_back(y_RD), self.routes)

    def send_gradients(self, grad_y_TD: Tensor) -> Tensor:
        """Bring the gradients of the sums to the experts."""
        codec = self.backward_codec
        if codec is None:
            return self.wire.send(gather_rows(grad_y_TD, self.routes))
        packed = self._send_packed(pack_rows(codec, grad_y_TD))
        return unpack_rows(codec, packed, grad_y_TD.dtype)

    def _send_packed(self, packed: PackedRows) -> PackedRows:
        return packed.replace_bytes(self.wire.send(gather_rows(packed.bytes_NB, self.routes)))
