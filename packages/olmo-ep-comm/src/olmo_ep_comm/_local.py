"""Every expert in this process: nothing is sent. The oracle of the other backends."""

import torch
from torch import Tensor

from ._autograd import combine_rows, dispatch_rows
from ._checks import check_inputs, check_num_experts, has_unknown_ids, unknown_ids_error
from ._interface import Dispatched
from ._pair_codec import PairCodec, check_codecs, pack_rows
from ._routed_exchange import RoutedExchange
from .reference import sort_routes


class _Loopback:
    """A wire from this rank to itself."""

    def send(self, values: Tensor) -> Tensor:
        return values

    def send_back(self, values: Tensor) -> Tensor:
        return values


class LocalDispatcher:
    """Sorts the rows by expert within one process.

    On a CPU R is the number of routes. On a GPU, and anywhere under `torch.compile`, the host reads
    nothing: R is T*K whatever the routes, and rows past `offsets_E[-1]` are undefined.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        codec: PairCodec | None = None,
        backward_codec: PairCodec | None = None,
    ) -> None:
        """Make a dispatcher that holds every expert.

        Args:
            num_experts: Number of experts, at least 1.
            codec: Encode and decode the tokens, as a backend that sends them would.
            backward_codec: The same for the gradients of the results.

        Raises:
            ValueError: If there is no expert.
        """
        check_num_experts(num_experts)
        check_codecs(codec, backward_codec)
        self._codec, self._backward_codec = codec, backward_codec
        self.num_experts = num_experts
        self.local_experts = range(num_experts)

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """Bring each token to its experts: see `Dispatcher.dispatch`.

        Raises:
            ValueError: If shapes or devices do not fit together, or, on a CPU, if an id is neither
                an expert nor -1. On a GPU such an id is a device-side assertion, since reading it
                would make the host wait; on a CPU under `torch.compile` it is a RuntimeError.
            TypeError: If a dtype is none of those named in `Dispatcher.dispatch`.
        """
        check_inputs(x_TD, expert_ids_TK, weights_TK)
        unknown = has_unknown_ids(expert_ids_TK, self.num_experts)
        routes = sort_routes(expert_ids_TK, self.num_experts)
        if x_TD.device.type != "cpu" or torch.compiler.is_compiling():
            torch._assert_async(~unknown, str(unknown_ids_error(self.num_experts)))
        elif unknown:
            raise unknown_ids_error(self.num_experts)
        else:
            routes = routes.keep_rows(int(routes.offsets_E[-1]))
        packed = None if self._codec is None else pack_rows(self._codec, x_TD)
        exchange = RoutedExchange(routes, _Loopback(), self._codec, self._backward_codec, packed)
        rows_RD, row_weights_R, handle = dispatch_rows(x_TD, weights_TK, exchange)
        num_dropped = torch.zeros((), dtype=torch.int64, device=x_TD.device)
        pair = None if exchange.packed is None else exchange.packed.pair()
        return Dispatched(rows_RD, row_weights_R, routes.offsets_E, num_dropped, handle, pair)

    def combine(self, y_RD: Tensor, handle: object) -> Tensor:
        """Add up each token's rows: see `Dispatcher.combine`.

        Raises:
            ValueError: If `y_RD` does not have the shape of the dispatched rows.
            TypeError: If `y_RD` does not have their dtype, or `handle` is not one.
        """
        return combine_rows(y_RD, handle)
