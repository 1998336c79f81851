"""The one-sided exchange of several ranks that share one process and one device.

The same plan, moves and order as between processes, for tests on one GPU or on a CPU. Every call
takes and returns a list with one entry a rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from olmo_ep_comm._checks import check_results
from olmo_ep_comm._interface import Dispatched
from olmo_ep_comm._pair_codec import PairCodec

from .buffers import Buffers, Settings
from .checks import check_call, check_shares, make_form
from .exchange import RowwiseExchange
from .impl import Impl, pick_moves
from .memory import InProcessMemory
from .plan import Admit
from .sizes import CombineBy


class VirtualRowwise:
    """`RowwiseDispatcher` for all ranks of a group at once; the arguments mean the same."""

    def __init__(
        self,
        *,
        num_ranks: int,
        num_experts: int,
        max_tokens: int,
        width: int,
        top_k: int,
        dtype: torch.dtype = torch.bfloat16,
        capacity: int | None = None,
        admit: Admit | None = None,
        live_forwards: int = 1,
        codec: PairCodec | None = None,
        backward_codec: PairCodec | None = None,
        combine_by: CombineBy = "get",
        impl: Impl = "auto",
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the buffers of all ranks on `device`.

        Raises:
            ValueError: If a number is out of range, the experts do not divide over the ranks,
                `capacity` and `admit` are not given together, or `impl` is unknown or cannot run.
            TypeError: If the dtype is neither bfloat16 nor float32.
        """
        check_shares(num_ranks, num_experts)
        form = make_form(
            num_ranks=num_ranks,
            num_experts=num_experts,
            max_tokens=max_tokens,
            width=width,
            top_k=top_k,
            dtype=dtype,
            capacity=capacity,
            admit=admit,
            live_forwards=live_forwards,
            codec=codec,
            backward_codec=backward_codec,
            combine_by=combine_by,
        )
        device = torch.empty(0, device=device).device  # with its index
        settings = Settings(
            form=form,
            admit=admit,
            codec=codec,
            backward_codec=backward_codec,
            moves=pick_moves(impl, device),
        )
        self.num_ranks = num_ranks
        self.num_experts = num_experts
        self._buffers = Buffers(settings, InProcessMemory(num_ranks, device))

    @property
    def buffer_bytes(self) -> dict[str, int]:
        """Bytes of each buffer of one rank."""
        return self._buffers.settings.form.buffer_bytes()

    @property
    def forward_bytes(self) -> int:
        """Bytes that a forward of `max_tokens` tokens holds on one rank until its backward."""
        return self._buffers.settings.form.forward_bytes()

    @property
    def num_free_leases(self) -> int:
        """Receive buffers that no forward holds."""
        return self._buffers.pool.num_free

    def local_experts(self, rank: int) -> range:
        """Return the experts of one rank."""
        share = self.num_experts // self.num_ranks
        return range(rank * share, (rank + 1) * share)

    def dispatch(
        self, tokens: list[Tensor], ids: list[Tensor], weights: list[Tensor]
    ) -> list[Dispatched]:
        """Dispatch the tokens of every rank: see `RowwiseDispatcher.dispatch`."""
        for name, given in (("tokens", tokens), ("ids", ids), ("weights", weights)):
            if len(given) != self.num_ranks:
                raise ValueError(
                    f"`{name}` must have one entry for each of {self.num_ranks} ranks, "
                    f"got {len(given)}."
                )
        for inputs in zip(tokens, ids, weights, strict=True):
            check_call(self._buffers, *inputs)
        exchange = RowwiseExchange(self._buffers, ids)
        outputs = _Dispatch.apply(exchange, *tokens, *weights)
        leases, exchange.leases = exchange.leases, ()
        rows, row_weights = outputs[: self.num_ranks], outputs[self.num_ranks :]
        handle = _Handle(exchange, leases)
        pairs = [packed.pair() for packed in exchange.packed] or [None] * self.num_ranks
        parts = zip(rows, row_weights, exchange.ends, exchange.plans, pairs, strict=True)
        return [
            Dispatched(rows_RD, weights_R, ends_E, plan.num_dropped, handle, pair)
            for rows_RD, weights_R, ends_E, plan, pair in parts
        ]

    def combine(self, results: list[Tensor], handle: object) -> list[Tensor]:
        """Combine the rows of every rank: see `RowwiseDispatcher.combine`."""
        if not isinstance(handle, _Handle):
            raise TypeError(f"`handle` must come from `dispatch`, got {type(handle).__name__}.")
        form = self._buffers.settings.form
        if len(results) != self.num_ranks:
            raise ValueError(
                f"`results` must have one entry for each of {self.num_ranks} ranks, "
                f"got {len(results)}."
            )
        for y_RD in results:
            check_results(y_RD, form.capacity, form.width, form.dtype)
        outputs = _Combine.apply(handle.exchange, *results)
        handle.leases = ()
        return list(outputs)


class _Handle:
    """The way home of one dispatch, and what holds its rows until then."""

    def __init__(self, exchange: RowwiseExchange, leases: tuple[Tensor, ...]) -> None:
        self.exchange = exchange
        self.leases = leases


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: RowwiseExchange, *inputs: Tensor) -> Any:
        ctx.exchange = exchange
        half = len(inputs) // 2
        rows, row_weights = exchange.send_tokens(list(inputs[:half]), list(inputs[half:]))
        ctx.save_for_backward(*exchange.leases)
        return *rows, *row_weights

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - hidden by the decorator
        ctx: Any, *grads: Tensor
    ) -> Any:
        _saved = ctx.saved_tensors  # held until the gradients are on their way
        half = len(grads) // 2
        tokens, weights = ctx.exchange.return_gradients(list(grads[:half]), list(grads[half:]))
        return None, *tokens, *weights


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: RowwiseExchange, *results: Tensor) -> Any:
        ctx.exchange = exchange
        return tuple(exchange.sum_results(list(results)))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - hidden by the decorator
        ctx: Any, *grads: Tensor
    ) -> Any:
        return None, *ctx.exchange.send_gradients(list(grads))
