"""Experts spread over a group, rows exchanged by `all_to_all_single`: exact and dropless.

Rank r of n owns the experts [r*E/n, (r+1)*E/n). One dispatch is

    counts    every rank tells every other how many rows it will send to each of its experts
    send      routes sorted by expert are sorted by destination rank too: one exchange moves them
    arrange   rows arrive by source rank, then expert; permuted to expert, then source rank

and combine is the same road backwards. Weights take a second, thin exchange. The counts are read by
the host, which needs them to size the exchange: one wait for the device each dispatch.

The same code runs on gloo (CPU) and NCCL (GPU). A compiled graph could leave out exchanges that one
rank does not need, so `torch.compile` breaks its graph at both calls and runs them as they are.

Shapes: T tokens, K slots, E experts of the whole group, L = E/n of this rank, R rows, S sources.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ._autograd import combine_rows, dispatch_rows, need_gradient
from ._checks import (
    PAYLOAD_DTYPES,
    WEIGHT_DTYPES,
    check_inputs,
    check_num_experts,
    has_unknown_ids,
    refused_elsewhere_error,
    unknown_ids_error,
)
from ._group import resolve_group, share_of_experts
from ._interface import Dispatched
from ._pair_codec import PackedRows, PairCodec, check_codecs, pack_rows
from ._routed_exchange import RoutedExchange
from ._uncompiled import uncompiled
from .reference import Routes, sort_routes


@dataclass(frozen=True, slots=True, eq=False)
class _AllToAll:
    """A wire to the other ranks.

    Attributes:
        group: The ranks.
        sent: Rows that this rank sends to each rank.
        received: Rows that it gets from each.
        arrival_R: Where each row, in canonical order, stands in the order of arrival.
        place_R: The inverse: the canonical place of each row that arrives.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    arrival_R: Tensor
    place_R: Tensor

    def send(self, values: Tensor) -> Tensor:
        arrived = self._exchange(values, self.sent, self.received)
        return arrived.index_select(0, self.arrival_R)

    def send_back(self, values: Tensor) -> Tensor:
        return self._exchange(values.index_select(0, self.place_R), self.received, self.sent)

    def _exchange(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        arrived = values.new_empty(sum(received), *values.shape[1:])
        dist.all_to_all_single(arrived, values.contiguous(), received, sent, group=self.group)
        return arrived


class AllToAllDispatcher:
    """Exchanges rows over a process group with uneven all-to-alls.

    Every rank of the group must call `dispatch` and `combine` equally often, in the same order,
    also with no tokens, and must run the same backward passes. So the loss of every rank must
    depend on its result of `combine` (for a rank with nothing to learn, `0 * y.sum()` will do), and
    all ranks or none are under `torch.no_grad()`. Given that, each rank takes part in each
    exchange, forward and backward, whatever its tokens, rows, and needs of a gradient. Only a
    backward pass limited to some `inputs=` leaves out what does not lead to them: there the tokens
    of every rank must.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        group: dist.ProcessGroup | None = None,
        codec: PairCodec | None = None,
        backward_codec: PairCodec | None = None,
    ) -> None:
        """Make a dispatcher for this rank's share of the experts.

        Args:
            num_experts: Experts of the whole group, a multiple of its size; the same on every rank.
            group: The ranks that share the experts, any ranks of the world in any number of groups.
                None is the default group.
            codec: Send the tokens as pairs; the same on every rank.
            backward_codec: Send the gradients of the results as pairs. Results, and the gradients
                of tokens, always travel as they are, since they are summed.

        Raises:
            ValueError: If the experts do not divide over the group, or this process is not in it.
            RuntimeError: If `group` is None and there is no default group.
        """
        check_num_experts(num_experts)
        check_codecs(codec, backward_codec)
        self._group = resolve_group(group, type(self).__name__)
        self._num_ranks = dist.get_world_size(self._group)
        self._codec, self._backward_codec = codec, backward_codec
        self._is_agreed = False
        self.num_experts = num_experts
        self.local_experts = share_of_experts(num_experts, self._group)

    @uncompiled(reason="the host reads row counts, and every rank must do every exchange")
    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """Bring each token to the ranks of its experts: see `Dispatcher.dispatch`.

        A fault on one rank must not leave the others waiting, so it travels with the counts: all
        ranks of the group raise together and no rows are sent.

        Raises:
            ValueError: If on any rank shapes or devices do not fit together or an id is neither an
                expert nor -1, or if ranks differ in width, dtype or codecs, or in `num_experts`.
            TypeError: If a dtype of this rank is none of those named in `Dispatcher.dispatch`.
        """
        if not self._is_agreed:
            self._check_agreement(x_TD.device)
        fault, routes, packed, packed_gradients = None, None, None, None
        try:
            check_inputs(x_TD, expert_ids_TK, weights_TK)
            packed = None if self._codec is None else pack_rows(self._codec, x_TD)
            if self._backward_codec is not None:  # only its form counts here
                packed_gradients = pack_rows(self._backward_codec, x_TD[:0])
            routes = sort_routes(expert_ids_TK, self.num_experts)
        except Exception as error:
            fault = error
        forms = (packed, packed_gradients)
        notice = self._write_notice(x_TD, expert_ids_TK, weights_TK, routes, forms)
        notices = torch.empty_like(notice)
        dist.all_to_all_single(notices, notice, group=self._group)
        sent, received = torch.stack([notice, notices]).tolist()
        self._raise_faults(fault, received)
        assert routes is not None, "routes are missing only with a fault, which was raised"

        share = len(self.local_experts)
        wire = _connect(
            self._group,
            [sum(row[:share]) for row in sent],
            [sum(row[:share]) for row in received],
            notices[:, :share],
        )
        x_TD = need_gradient(x_TD, weights_TK)
        exchange = RoutedExchange(
            routes.keep_rows(sum(wire.sent)), wire, self._codec, self._backward_codec, packed
        )
        rows_RD, row_weights_R, handle = dispatch_rows(x_TD, weights_TK, exchange)
        offsets_E = notices[:, :share].sum(0).cumsum(0).int()
        num_dropped = torch.zeros((), dtype=torch.int64, device=x_TD.device)
        pair = None if exchange.packed is None else exchange.packed.pair()
        return Dispatched(rows_RD, row_weights_R, offsets_E, num_dropped, handle, pair)

    @uncompiled(reason="every rank must do every exchange")
    def combine(self, y_RD: Tensor, handle: object) -> Tensor:
        """Bring the rows home and add up each token's: see `Dispatcher.combine`.

        Nothing tells the other ranks of a fault found here: they wait until their time-out.

        Raises:
            ValueError: If `y_RD` does not have the shape of the dispatched rows.
            TypeError: If `y_RD` does not have their dtype, or `handle` is not one.
        """
        return combine_rows(y_RD, handle)

    def _check_agreement(self, device: torch.device) -> None:
        """Raise on every rank unless all have the same experts, on which notices depend.

        The constructor leaves this to the first `dispatch`, as it does not communicate.
        """
        mine = torch.full((self._num_ranks,), self.num_experts, dtype=torch.int64, device=device)
        every = torch.empty_like(mine)
        dist.all_to_all_single(every, mine, group=self._group)
        if len(set(every.tolist())) > 1:
            raise ValueError(
                f"`num_experts` must be the same on every rank of the group, "
                f"got {every.tolist()} in rank order."
            )
        self._is_agreed = True

    def _write_notice(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        routes: Routes | None,
        forms: tuple[PackedRows | None, PackedRows | None],
    ) -> Tensor:
        """Return (ranks, L + 6), for each rank: row counts, fault, width, two dtypes, two sizes."""
        share = len(self.local_experts)
        notice = torch.zeros(self._num_ranks, share + 6, dtype=torch.int64, device=x_TD.device)
        if routes is None:
            notice[:, share] = 1
            return notice
        counts_E = routes.offsets_E.diff(prepend=routes.offsets_E.new_zeros(1))
        notice[:, :share] = counts_E.view(self._num_ranks, share)
        notice[:, share] = has_unknown_ids(expert_ids_TK, self.num_experts)
        notice[:, share + 1] = x_TD.shape[1]
        notice[:, share + 2] = PAYLOAD_DTYPES.index(x_TD.dtype)
        notice[:, share + 3] = WEIGHT_DTYPES.index(weights_TK.dtype)
        for column, packed in enumerate(forms, share + 4):
            notice[:, column] = 0 if packed is None else packed.bytes_NB.shape[1]
        return notice

    def _raise_faults(self, fault: Exception | None, received: list[list[int]]) -> None:
        """Raise on every rank if any has a fault, with this rank's own error where it has one."""
        if fault is not None:
            raise fault
        share = len(self.local_experts)
        faulty = [rank for rank, row in enumerate(received) if row[share]]
        if dist.get_rank(self._group) in faulty:
            raise unknown_ids_error(self.num_experts)
        if faulty:
            raise refused_elsewhere_error(faulty)
        forms = [_describe_form(*row[share + 1 :]) for row in received]
        if len(set(forms)) > 1:
            listed = "; ".join(f"rank {rank}: {form}" for rank, form in enumerate(forms))
            raise ValueError(
                f"`x_TD` and `weights_TK` must have one width, dtype and encoded size on "
                f"every rank of the group, got {listed}."
            )


def _connect(
    group: dist.ProcessGroup, sent: list[int], received: list[int], counts_SL: Tensor
) -> _AllToAll:
    """Return the wire on which `counts_SL` rows arrive from each source for each local expert."""
    num_sources, share = counts_SL.shape
    expert_SL = torch.arange(share, device=counts_SL.device).repeat(num_sources)
    expert_R = expert_SL.repeat_interleave(counts_SL.flatten(), output_size=sum(received))
    arrival_R = expert_R.argsort(stable=True)  # rows of one expert stay in the order of sources
    return _AllToAll(group, sent, received, arrival_R, arrival_R.argsort())


def _describe_form(
    width: int, payload: int, weight: int, num_bytes: int, gradient_bytes: int
) -> str:
    encoded = f" in {num_bytes} bytes" if num_bytes else ""
    gradients = f", gradients in {gradient_bytes} bytes" if gradient_bytes else ""
    weights = f"weights {WEIGHT_DTYPES[weight]}"
    return f"width {width}, {PAYLOAD_DTYPES[payload]}{encoded}, {weights}{gradients}"
