"""Experts spread over a group, rows written straight into the memory of their ranks."""

import math
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from olmo_ep_comm._autograd import combine_rows, dispatch_rows, need_gradient
from olmo_ep_comm._checks import check_num_experts
from olmo_ep_comm._group import (
    agree,
    check_not_capturing,
    device_of,
    refusing_together,
    resolve_group,
    share_of_experts,
)
from olmo_ep_comm._interface import Dispatched
from olmo_ep_comm._pair_codec import PairCodec
from olmo_ep_comm._uncompiled import uncompiled

from .buffers import Buffers, Settings
from .checks import DTYPES, check_call, make_form
from .exchange import RowwiseExchange
from .files import FileMemory
from .impl import Impl, pick_moves
from .memory import Memory
from .plan import Admit
from .sizes import CombineBy
from .symmetric import SymmetricMemory

_SHORTEST_TIMEOUT_S = 0.001


class RowwiseDispatcher:
    """Exchanges rows by one-sided writes: no wait of the host, and no row sent twice to a rank.

    With an NCCL group, of GPUs in one NVLink domain, it uses torch's symmetric memory and Triton
    kernels; with a gloo group, of CPU processes on one host, files that they map and plain torch.

    Making one is collective, outside of a CUDA graph, and it must live until every rank is done
    with it. Every rank of the group must call `dispatch` and `combine` equally often, in the same
    order, on one stream, also with no tokens, and must run the same backward passes; see
    `AllToAllDispatcher` for what that asks of a loss.

    The rows of a dispatch are a receive buffer, leased until the backward of that dispatch has run
    (or its graph is dropped; under `torch.no_grad()`, until `combine`). Nobody may read
    `rows_RD` or `encoded` afterwards. Any number of layers may share a dispatcher.

    A CUDA graph keeps the receive buffer that its dispatch was captured with, and writes it at each
    replay, though the lease ends with the captured autograd graph. So a captured layer needs a
    dispatcher of its own, or nothing else that uses this one may be alive at a replay.

    Note:
        R is `capacity` whatever the routes. `buffer_bytes` are allocated once. Each live forward
        allocates `forward_bytes` besides, with a codec its decoded rows among them; the backward of
        combine allocates one set of rows, with a `backward_codec` one encoded and one decoded.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        group: dist.ProcessGroup | None = None,
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
        timeout_s: float = 300.0,
    ) -> None:
        """Allocate the buffers.

        Args:
            num_experts: Experts of the whole group, a multiple of its size.
            group: The ranks that share the experts; None is the default group.
            max_tokens: Most tokens that any rank will dispatch at once.
            width: D; a row must fill whole words of 16 bytes.
            top_k: K.
            dtype: Of tokens and results: bfloat16 or float32.
            capacity: Rows that a rank can receive in one dispatch. None is the worst case,
                `max_tokens * ranks * min(K, E / ranks)`: then nothing is ever dropped. Tokens that
                name an expert twice could exceed it, and are refused where they do.
            admit: With `capacity`, which routes are kept: a function of the requested routes, int64
                (source ranks, destination ranks, experts of a rank), and the capacity, that returns
                how many of each are kept, integers. It runs on every rank and must return the same
                there, without waiting for the device. A source keeps its first routes to an
                expert. What is more than was requested, or in row order more than the capacity, is
                cut and counted as dropped.
            live_forwards: Receive buffers: dispatches whose backward is still to come, over all
                layers and microbatches that share this dispatcher.
            codec: Send tokens as pairs.
            backward_codec: Send gradients of results as pairs.
            combine_by: How sums travel, of results and of gradients of tokens: "get", the rank of
                the experts keeps them and that of the tokens fetches and adds; or "put", it writes
                them into that of the tokens, which adds them up. The results have the same bits.
                "get" was the faster one on two H200s, and needs no buffer of sums, but with a
                `backward_codec` that of gradients grows.
            impl: "triton", "reference" (plain torch, reads the device), or "auto": "triton" on a
                GPU and "reference" on a CPU.
            timeout_s: Seconds after which a GPU that waits for another one gives up, which ends its
                process: finite, and at least a millisecond. It must outlast a rank that compiles
                kernels or writes a checkpoint.

        Raises:
            ValueError: If a number is out of range, ranks give different ones, `capacity` and
                `admit` are not given together, or `impl` is unknown or cannot run; on every rank,
                if one refuses its arguments.
            TypeError: If the dtype is neither bfloat16 nor float32.
            RuntimeError: If there is no process group, a CUDA graph is being captured, or CPU
                processes have no room for a buffer or are not on one host.
        """
        self._group = resolve_group(group, type(self).__name__)
        check_not_capturing(type(self).__name__)
        device = device_of(self._group)
        with refusing_together(self._group):
            check_num_experts(num_experts)
            _check_timeout(timeout_s)
            self.num_experts = num_experts
            self.local_experts = share_of_experts(num_experts, self._group)
            form = make_form(
                num_ranks=dist.get_world_size(self._group),
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
            moves = pick_moves(impl, device)
        agree(
            self._group,
            num_experts=num_experts,
            max_tokens=max_tokens,
            width=width,
            top_k=top_k,
            dtype=DTYPES.index(dtype),
            capacity=form.capacity,
            codec=_number(form.scale_bytes),
            backward_codec=_number(form.gradient_scale_bytes),
            live_forwards=live_forwards,
            combine_by=get_args(CombineBy).index(combine_by),
        )
        memory: Memory = FileMemory(self._group)
        if device.type == "cuda":
            memory = SymmetricMemory(self._group, device, timeout_s)
        self._buffers = Buffers(
            Settings(
                form=form, admit=admit, codec=codec, backward_codec=backward_codec, moves=moves
            ),
            memory,
        )

    @property
    def buffer_bytes(self) -> dict[str, int]:
        """Bytes of each buffer of this rank, allocated once: see `rowwise_buffer_bytes`."""
        return self._buffers.settings.form.buffer_bytes()

    @property
    def forward_bytes(self) -> int:
        """Bytes that a forward of `max_tokens` tokens holds until its backward, buffers apart."""
        return self._buffers.settings.form.forward_bytes()

    @uncompiled(reason="every rank must do every exchange")
    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """Bring each token to the ranks of its experts: see `Dispatcher.dispatch`.

        A fault on one rank must not leave the others waiting, so it travels with the counts and no
        rows are sent. Between CPU processes all ranks raise together, and the dispatcher may be
        used again. A GPU reads nothing on the host: there an unknown id, or input that another rank
        refused, is a device-side assertion on every rank that did not raise, in the same dispatch,
        and the process ends; so are routes to a rank for which a `capacity` of None has no rows.
        What `admit` raises, or a codec in `decode`, is not told.

        Raises:
            ValueError: If shapes or devices do not fit together or what the dispatcher was made
                for, or, on a CPU, if an id is neither an expert nor -1, another rank refused its
                input, or with a `capacity` of None tokens that name an expert twice bring a rank
                more routes than it has rows.
            TypeError: If the dtype is not that of the dispatcher, or the weights are not float32.
            RuntimeError: If `live_forwards` dispatches are alive already.
        """
        with self._buffers.faults.telling_others():
            check_call(self._buffers, x_TD, expert_ids_TK, weights_TK)
            exchange = _OneRank(RowwiseExchange(self._buffers, [expert_ids_TK]))
        x_TD = need_gradient(x_TD, weights_TK)
        rows_RD, row_weights_R, handle = dispatch_rows(x_TD, weights_TK, exchange)
        inner = exchange.inner
        pair = inner.packed[0].pair() if inner.packed else None
        (plan,), (offsets_E,) = inner.plans, inner.ends
        return Dispatched(rows_RD, row_weights_R, offsets_E, plan.num_dropped, handle, pair)

    @uncompiled(reason="every rank must do every exchange")
    def combine(self, y_RD: Tensor, handle: object) -> Tensor:
        """Bring the rows home and add up each token's: see `Dispatcher.combine`.

        The rows of a token on one rank are added first, in slot order and in float32, and rounded
        to the dtype of the rows; then the sums, in the order of their first slots.

        Nothing tells the other ranks of a fault found here: they wait until their time-out.

        Raises:
            ValueError: If `y_RD` does not have the shape of the dispatched rows.
            TypeError: If `y_RD` does not have their dtype, or `handle` is not one.
        """
        return combine_rows(y_RD, handle)


def _number(scale_bytes: int | None) -> int:
    return -1 if scale_bytes is None else scale_bytes


def _check_timeout(timeout_s: float) -> None:
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool):
        raise TypeError(f"`timeout_s` must be a number of seconds, got {timeout_s!r}.")
    if not (math.isfinite(timeout_s) and timeout_s >= _SHORTEST_TIMEOUT_S):
        raise ValueError(
            f"`timeout_s` must be finite and at least {_SHORTEST_TIMEOUT_S} seconds, the unit of "
            f"a barrier, got {timeout_s}; give more than the longest that a rank can be late."
        )


class _OneRank:
    """The exchange of the one rank of this process. See `Exchange`."""

    def __init__(self, inner: RowwiseExchange) -> None:
        self.inner = inner
        self.leases: tuple[Tensor, ...] = inner.leases
        inner.leases = ()

    def send_tokens(self, x_TD: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        (rows_RD,), (row_weights_R,) = self.inner.send_tokens([x_TD], [weights_TK])
        return rows_RD, row_weights_R

    def return_gradients(
        self, grad_rows_RD: Tensor, grad_row_weights_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        (grad_x_TD,), (grad_weights_TK,) = self.inner.return_gradients(
            [grad_rows_RD], [grad_row_weights_R]
        )
        return grad_x_TD, grad_weights_TK

    def sum_results(self, y_RD: Tensor) -> Tensor:
        (y_TD,) = self.inner.sum_results([y_RD])
        return y_TD

    def send_gradients(self, grad_y_TD: Tensor) -> Tensor:
        (grad_y_RD,) = self.inner.send_gradients([grad_y_TD])
        return grad_y_RD
