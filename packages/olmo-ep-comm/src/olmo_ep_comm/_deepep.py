"""Experts spread over a group, rows moved by DeepEP v2: bfloat16, and no wait of the host.

The expanded layout gives every route a row, sorted by expert; with alignment 1 the running counts
that DeepEP keeps on the device are the ends that `Dispatched` promises. Its two calls make the four
exchanges of a layer:

    dispatch            rows and weights to the experts
    backward of it      one combine of gradient rows with gradients of row weights
    combine             a sum of rows for each rank, rounded to bfloat16, then over ranks in float32
    backward of it      a dispatch along the routes of the first (DeepEP: cached)

DeepEP 2.0 refuses a cached dispatch into the expanded layout: there the routes are sent again,
which gives the same rows because the order is the deterministic one.

Shapes: T tokens, K slots, E experts of the whole group, R rows held, D model width.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._autograd import combine_rows, dispatch_rows, need_gradient
from ._checks import (
    check_fits,
    check_inputs,
    check_num_experts,
    check_positive,
    has_unknown_ids,
    unknown_ids_error,
)
from ._deepep_import import DeepEP, import_deepep
from ._group import (
    agree,
    check_not_capturing,
    refusing_together,
    resolve_group,
    share_of_experts,
)
from ._interface import Dispatched
from ._pair_codec import PackedRows, PairCodec, check_codecs, pack_rows, unpack_rows
from ._uncompiled import uncompiled

_LIMITS = {"num_experts": 2048, "top_k": 32}
_MAX_LOCAL_EXPERTS = 256
_WIDTH_STEP = 256


class DeepEPDispatcher:
    """Exchanges rows with DeepEP v2 (2.0 or 2.1), imported when the dispatcher is made.

    Making one, and `close`, are collective. It must be made outside of a CUDA graph, and closed
    before the process group is destroyed; it is a context manager. Every rank of the group must
    call `dispatch` and `combine` equally often, in the same order, also with no tokens, and must
    run the same backward passes; see `AllToAllDispatcher` for what that asks of a loss.

    Note:
        The host reads nothing, so R is the worst case, `max_tokens * ranks * min(K, E / ranks)`,
        whatever the routes: DeepEP allocates so many rows for each dispatch.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        group: dist.ProcessGroup | None = None,
        max_tokens: int,
        width: int,
        top_k: int,
        codec: PairCodec | None = None,
        backward_codec: PairCodec | None = None,
        cpu_timeout_s: int = 300,
        gpu_timeout_s: int = 100,
    ) -> None:
        """Import DeepEP and allocate its buffer.

        Args:
            num_experts: Experts of the whole group, a multiple of its size.
            group: The ranks that share the experts; None is the default group.
            max_tokens: Most tokens that any rank will dispatch at once; the same on every rank.
            width: D, a multiple of 256.
            top_k: K, at most 32.
            codec: Send the tokens as pairs of float8_e4m3fn data and scales, as many of them a row
                as fill whole 32-bit words.
            backward_codec: Send the gradients of the results as such pairs.
            cpu_timeout_s: Seconds after which DeepEP ends a process that waits on the host.
            gpu_timeout_s: The same on the device. Both must outlast a rank that compiles a kernel
                or writes a checkpoint meanwhile.

        Raises:
            ValueError: If a number is out of range, or ranks give different ones; on every rank, if
                one refuses its arguments.
            RuntimeError: If DeepEP v2 is not there, there is no process group, or a CUDA graph is
                being captured.
        """
        self._group = resolve_group(group, type(self).__name__)
        check_not_capturing(type(self).__name__)
        with refusing_together(self._group):
            check_num_experts(num_experts)
            check_codecs(codec, backward_codec)
            _check_limits(num_experts, max_tokens, width, top_k)
            check_positive("cpu_timeout_s", cpu_timeout_s)
            check_positive("gpu_timeout_s", gpu_timeout_s)
            self.num_experts = num_experts
            self.local_experts = share_of_experts(num_experts, self._group)
            if len(self.local_experts) > _MAX_LOCAL_EXPERTS:
                raise ValueError(
                    f"`num_experts` must be at most {_MAX_LOCAL_EXPERTS} a rank for DeepEP, "
                    f"got {len(self.local_experts)}; spread them over more ranks."
                )
            deepep = import_deepep()
        # DeepEP takes over the group's communicator, which exists only after a first collective.
        agree(self._group, num_experts=num_experts, max_tokens=max_tokens, width=width, top_k=top_k)
        self._form = (max_tokens, width, top_k)
        self._codec, self._backward_codec = codec, backward_codec
        self._deepep = deepep
        self._buffer: Any = deepep.module.ElasticBuffer(
            self._group,
            num_max_tokens_per_rank=max_tokens,
            hidden=width,
            num_topk=top_k,
            deterministic=True,  # rows in the canonical order
            num_cpu_timeout_secs=cpu_timeout_s,
            num_gpu_timeout_secs=gpu_timeout_s,
            explicitly_destroy=True,  # else a collective runs whenever Python collects it
        )

    @uncompiled(reason="DeepEP's calls are opaque, and every rank must do every exchange")
    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """Bring each token to the ranks of its experts: see `Dispatcher.dispatch`.

        Nothing tells the other ranks of a fault found here: they wait until their time-out.

        Raises:
            ValueError: If shapes or devices do not fit together or what the dispatcher was made
                for, or, on a CPU, if an id is neither an expert nor -1 or a token names an expert
                twice. On a GPU these two are device-side assertions.
            TypeError: If the tokens are not bfloat16 or the weights not float32, or the ids neither
                int64 nor int32.
            RuntimeError: After `close`, or if torch is set to fill uninitialised memory, which
                DeepEP does not allow.
        """
        self._check_open()
        check_inputs(x_TD, expert_ids_TK, weights_TK)
        self._check_form(x_TD, expert_ids_TK, weights_TK)
        _check_ids(expert_ids_TK, self.num_experts)
        packed = None if self._codec is None else pack_rows(self._codec, x_TD)
        exchange = _DeepEPExchange(self, expert_ids_TK, packed)
        x_TD = need_gradient(x_TD, weights_TK)
        rows_RD, row_weights_R, handle = dispatch_rows(x_TD, weights_TK, exchange)
        num_dropped = torch.zeros((), dtype=torch.int64, device=x_TD.device)
        pair = None if exchange.packed is None else exchange.packed.pair()
        return Dispatched(rows_RD, row_weights_R, exchange.offsets_E, num_dropped, handle, pair)

    @uncompiled(reason="DeepEP's calls are opaque, and every rank must do every exchange")
    def combine(self, y_RD: Tensor, handle: object) -> Tensor:
        """Bring the rows home and add up each token's: see `Dispatcher.combine`.

        Rows of one rank are added in float32 and rounded to bfloat16 before they travel.

        Raises:
            ValueError: If `y_RD` does not have the shape of the dispatched rows.
            TypeError: If `y_RD` does not have their dtype, or `handle` is not one.
            RuntimeError: After `close`.
        """
        self._check_open()
        return combine_rows(y_RD, handle)

    def close(self) -> None:
        """Free DeepEP's memory on every rank; afterwards nothing may run, backward included."""
        if self._buffer is not None:
            self._buffer.destroy()
            self._buffer = None

    def __enter__(self) -> "DeepEPDispatcher":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._buffer is None:
            raise RuntimeError("`DeepEPDispatcher` is closed; make another one.")

    def _check_form(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> None:
        if x_TD.dtype != torch.bfloat16:
            raise TypeError(
                f"`x_TD` must be torch.bfloat16 for DeepEP, got {x_TD.dtype}; call `.bfloat16()` "
                'or use the backend "all_to_all" or "rowwise".'
            )
        if weights_TK.dtype != torch.float32:
            raise TypeError(
                f"`weights_TK` must be torch.float32 for DeepEP, got {weights_TK.dtype}; call "
                '`.float()` or use the backend "all_to_all".'
            )
        check_fits(x_TD, expert_ids_TK, *self._form)
        if (
            torch.are_deterministic_algorithms_enabled()
            and torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue] - a property of the module
        ):
            raise RuntimeError(
                "`torch.utils.deterministic.fill_uninitialized_memory` must be False for DeepEP "
                "while deterministic algorithms are on; set it before `dispatch`."
            )


class _DeepEPExchange:
    """See `Exchange`.

    Attributes:
        packed: The tokens encoded, if they are; after `send_tokens` the rows that arrived.
        leases: None: DeepEP allocates the rows.
        offsets_E: The ends of this rank's rows, after `send_tokens`.
    """

    offsets_E: Tensor

    def __init__(
        self, owner: DeepEPDispatcher, expert_ids_TK: Tensor, packed: PackedRows | None
    ) -> None:
        self._deepep: DeepEP = owner._deepep
        self._owner = owner
        self._ids_TK = expert_ids_TK.to(self._deepep.module.topk_idx_t).contiguous()
        self._num_experts = owner.num_experts
        self._codec, self._backward_codec = owner._codec, owner._backward_codec
        self._handle: Any = None
        self.packed = packed
        self.leases: tuple[Tensor, ...] = ()

    def send_tokens(self, x_TD: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Bring tokens and weights to the experts in one expanded dispatch."""
        payload = x_TD.contiguous() if self.packed is None else _words_of(self.packed)
        rows, row_weights_R, self._handle = self._dispatch_anew(payload, weights_TK.contiguous())
        # Alignment 1: an expert's first row plus its count is its end.
        self.offsets_E = self._handle.psum_num_recv_tokens_per_expert
        if self._codec is not None and self.packed is not None:
            self.packed = _rows_of(rows, self.packed)
            rows = unpack_rows(self._codec, self.packed, x_TD.dtype)
        return rows, row_weights_R

    def return_gradients(
        self, grad_rows_RD: Tensor, grad_row_weights_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Bring the gradients of both home in one combine."""
        grad_x_TD, grad_weights_TK, _event = self._buffer.combine(
            grad_rows_RD.contiguous(),
            self._handle,
            topk_weights=grad_row_weights_R.contiguous(),
        )
        return grad_x_TD, grad_weights_TK

    def sum_results(self, y_RD: Tensor) -> Tensor:
        """Bring the results home."""
        return self._buffer.combine(y_RD.contiguous(), self._handle)[0]

    def send_gradients(self, grad_y_TD: Tensor) -> Tensor:
        """Bring the gradients of the sums to the experts, along the same routes."""
        codec = self._backward_codec
        if codec is None:
            return self._dispatch_again(grad_y_TD.contiguous())
        packed = pack_rows(codec, grad_y_TD)
        packed = _rows_of(self._dispatch_again(_words_of(packed)), packed)
        return unpack_rows(codec, packed, grad_y_TD.dtype)

    @property
    def _buffer(self) -> Any:
        self._owner._check_open()
        return self._owner._buffer

    def _dispatch_anew(self, payload: Any, weights_TK: Tensor | None) -> tuple[Any, Any, Any]:
        rows, _ids, row_weights_R, handle, _event = self._buffer.dispatch(
            payload,
            topk_idx=self._ids_TK,
            topk_weights=weights_TK,
            num_experts=self._num_experts,
            num_max_tokens_per_rank=self._owner._form[0],
            expert_alignment=1,
            do_cpu_sync=False,
            do_expand=True,
        )
        return rows, row_weights_R, handle

    def _dispatch_again(self, payload: Any) -> Any:
        if not self._deepep.has_cached_expand:
            return self._dispatch_anew(payload, None)[0]
        # A cached dispatch takes neither from the handle by itself: without `num_sms` upstream
        # raises, without `do_expand` it silently returns the other layout.
        handle = self._handle
        return self._buffer.dispatch(
            payload, handle=handle, num_sms=handle.num_sms, do_expand=handle.do_expand
        )[0]


def _words_of(packed: PackedRows) -> tuple[Tensor, Tensor]:
    """Return the pair as DeepEP takes it: scales in words of four bytes."""
    data_ND, scales_NS = packed.pair()
    if scales_NS.shape[1] % 4 or packed.data_dtype != torch.float8_e4m3fn:
        raise ValueError(
            "`codec.encode` must return torch.float8_e4m3fn and a multiple of 4 scales a row for "
            f"DeepEP, got {packed.data_dtype} and {scales_NS.shape[1]} scales."
        )
    return data_ND.contiguous(), scales_NS.contiguous().view(torch.int32)


def _rows_of(arrived: tuple[Tensor, Tensor], sent: PackedRows) -> PackedRows:
    return sent.replace_bytes(torch.cat([part.view(torch.uint8) for part in arrived], 1))


def _check_limits(num_experts: int, max_tokens: int, width: int, top_k: int) -> None:
    for name, value in (("max_tokens", max_tokens), ("width", width), ("top_k", top_k)):
        check_positive(name, value)
    for name, value in (("num_experts", num_experts), ("top_k", top_k)):
        if not 1 <= value <= _LIMITS[name]:
            raise ValueError(f"`{name}` must be in [1, {_LIMITS[name]}] for DeepEP, got {value}.")
    if width % _WIDTH_STEP:
        raise ValueError(
            f"`width` must be a multiple of {_WIDTH_STEP} for DeepEP, got {width}; "
            'use the backend "all_to_all" for other widths.'
        )


def _check_ids(expert_ids_TK: Tensor, num_experts: int) -> None:
    """Refuse ids that DeepEP would trap on, without a wait of the host on a GPU."""
    unknown = has_unknown_ids(expert_ids_TK, num_experts)
    sorted_TK = expert_ids_TK.sort(1).values
    twice = ((sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] >= 0)).any()
    message = "`expert_ids_TK` must not name an expert twice in one token for DeepEP."
    if expert_ids_TK.device.type != "cpu":
        torch._assert_async(~unknown, str(unknown_ids_error(num_experts)))
        torch._assert_async(~twice, message)
    elif unknown:
        raise unknown_ids_error(num_experts)
    elif twice:
        raise ValueError(message)
