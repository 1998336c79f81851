"""The order of a one-sided exchange, for every rank of the group that lives in this process.

Shapes: T tokens, K slots, R ranks, C rows, D width; lists have one entry for each of these ranks.
"""

from typing import Any

import torch
from torch import Tensor

from olmo_ep_comm._pair_codec import PackedRows, PairCodec, pack_rows, unpack_rows

from .buffers import Buffers
from .plan import SourcePlan
from .sizes import ALIGN_BYTES, WORD_BYTES


class RowwiseExchange:
    """One dispatch and its way home. See `Exchange`; here every argument is a list.

    Attributes:
        packed: After `send_tokens`, with a codec, the rows that arrived; else empty.
        leases: What holds the receive buffer.
        plans: Where the routes of each rank go, after `send_tokens`.
        ends: int32 (experts of a rank), the ends of the rows of each rank, after `send_tokens`.
    """

    def __init__(self, buffers: Buffers, ids: list[Tensor]) -> None:
        self._buffers = buffers
        self._form = buffers.settings.form
        self._moves = buffers.settings.moves
        self._ids = ids
        self._num_tokens = [len(value) for value in ids]
        self._meta: list[Tensor] = []
        self._num_rows: list[Tensor] = []
        self.packed: list[PackedRows] = []
        self.plans: list[SourcePlan] = []
        self.ends: list[Tensor] = []
        self._lease, holder, self._end_lease = buffers.pool.take()
        self.leases: tuple[Tensor, ...] = (holder,)

    def send_tokens(
        self, tokens: list[Tensor], weights: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Exchange counts, plan, and write tokens and weights into the ranks of the experts."""
        buffers, form, moves = self._buffers, self._form, self._moves
        ranks = buffers.memory.ranks
        try:
            packed, requests = self._exchange_counts(tokens)
        except Exception:
            self._end_lease()  # nobody writes rows, and a traceback may hold the holder for long
            raise
        for i, rank in enumerate(ranks):
            counts_RW = buffers.counts.own[i]
            plan, ends_L, is_sound = moves.put_plan(
                *(buffers.meta, rank, requests[i], weights[i]),
                *(counts_RW, buffers.settings.admit, form),
            )
            if is_sound.is_cuda:
                buffers.faults.assert_none(is_sound, counts_RW)
            words_TW = _words(tokens[i], packed[i], form.token_words)
            moves.put_rows(buffers.rows, counts_RW[:, form.lease_column], words_TW, plan)
            self.plans.append(plan)
            self.ends.append(ends_L)
            self._num_rows.append(ends_L[-1])
        buffers.memory.barrier()
        rows, row_weights = [], []
        received = buffers.rows.buffers[self._lease]
        # Others and kernels write unseen by autograd: rows that are kept longer than their lease
        # must be an error in a backward that needs them, not other rows.
        torch.autograd.graph.increment_version(received.own)
        for i in range(len(ranks)):
            meta_C4, weights_C = moves.take_meta(buffers.meta.own[i], self._num_rows[i])
            words_CW = received.own[i]
            moves.fan_out(words_CW, words_CW, meta_C4, self._num_rows[i])
            self._meta.append(meta_C4)
            row_weights.append(weights_C)
            rows.append(self._unpack(words_CW, packed[i], buffers.settings.codec, keep=True))
        return rows, row_weights

    def _exchange_counts(self, tokens: list[Tensor]) -> tuple[list[PackedRows | None], list[Any]]:
        """Return the tokens as they travel and what the plan needs of the requests."""
        buffers = self._buffers
        with buffers.faults.telling_others():
            packed = [self._pack(buffers.settings.codec, x_TD) for x_TD in tokens]
        requests = [
            self._moves.put_requests(buffers.counts, rank, ids_TK, self._lease, self._form)
            for rank, ids_TK in zip(buffers.memory.ranks, self._ids, strict=True)
        ]
        self._ids = []
        buffers.memory.barrier()
        if buffers.memory.device.type == "cpu":
            buffers.faults.raise_any()
        return packed, requests

    def sum_results(self, results: list[Tensor]) -> list[Tensor]:
        """Bring the sums of each rank to the ranks of the tokens, and add them up there."""
        self._buffers.memory.barrier()
        self._give_sums(results)
        self._buffers.memory.barrier()
        return self._add_sums()

    def return_gradients(
        self, grad_rows: list[Tensor], grad_row_weights: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Bring home the gradients of tokens, as results, and of weights, each to its slot."""
        buffers, form = self._buffers, self._form
        buffers.memory.barrier()
        self._give_sums(grad_rows)
        for i, values_C in enumerate(grad_row_weights):
            self._moves.put_weights(
                buffers.weights, values_C.contiguous(), self._meta[i], self._num_rows[i], form
            )
        buffers.memory.barrier()
        grad_weights = []
        for i, plan in enumerate(self.plans):
            slots = self._num_tokens[i] * form.top_k
            home_TK = buffers.weights.own[i][:slots].view_as(plan.row_TK)
            grad_weights.append(torch.where(plan.row_TK >= 0, home_TK, 0.0))
        return self._add_sums(), grad_weights

    def send_gradients(self, gradients: list[Tensor]) -> list[Tensor]:
        """Write the gradients of results along the plan of the dispatch, into fresh rows."""
        buffers, form = self._buffers, self._form
        codec = buffers.settings.backward_codec
        packed = [self._pack(codec, grad_y_TD) for grad_y_TD in gradients]
        buffers.memory.barrier()
        for i, plan in enumerate(self.plans):
            words_TW = _words(gradients[i], packed[i], form.gradient_words)
            self._moves.put_rows(buffers.gradients, buffers.first_R, words_TW, plan)
        buffers.memory.barrier()
        rows = []
        for i, words_CW in enumerate(buffers.gradients.buffers[0].own):
            out_CW = torch.empty_like(words_CW)
            self._moves.fan_out(words_CW, out_CW, self._meta[i], self._num_rows[i])
            rows.append(self._unpack(out_CW, packed[i], codec, keep=False))
        return rows

    def _give_sums(self, values: list[Tensor]) -> None:
        sums, form = self._buffers.sums, self._form
        for i, y_CD in enumerate(values):
            rows = (_in_words(y_CD), self._meta[i], self._num_rows[i])
            if form.combine_by == "put":
                self._moves.put_sums(sums, *rows, form)
            else:
                self._moves.keep_sums(sums.own[i], *rows)

    def _add_sums(self) -> list[Tensor]:
        sums, form = self._buffers.sums, self._form
        if form.combine_by == "get":
            return [self._moves.get_sums(sums, plan, form) for plan in self.plans]
        pairs = zip(sums.own, self.plans, strict=True)
        return [self._moves.add_sums(own, plan.num_sums_T, form) for own, plan in pairs]

    def _pack(self, codec: PairCodec | None, x_TD: Tensor) -> PackedRows | None:
        return None if codec is None else pack_rows(codec, x_TD)

    def _unpack(
        self, words_CW: Tensor, sent: PackedRows | None, codec: PairCodec | None, *, keep: bool
    ) -> Tensor:
        if sent is None or codec is None:
            return words_CW.view(self._form.dtype)
        bytes_CB = words_CW.view(torch.uint8)[:, : sent.bytes_NB.shape[1]]
        packed = sent.replace_bytes(bytes_CB)
        if keep:
            self.packed.append(packed)
        return unpack_rows(codec, packed, self._form.dtype)


def _in_words(x_ND: Tensor) -> Tensor:
    """Return rows that start at whole words of 16 bytes, as those of a slice may not."""
    x_ND = x_ND.contiguous()
    is_aligned = x_ND.numel() and not x_ND.data_ptr() % ALIGN_BYTES  # no values, no address
    return x_ND if is_aligned else x_ND.clone()


def _words(x_TD: Tensor, packed: PackedRows | None, num_words: int) -> Tensor:
    """Return the rows that travel, (T, W) int32: packed ones padded to whole words."""
    if packed is None:
        return _in_words(x_TD).view(torch.int32)
    bytes_TB = packed.bytes_NB
    padded = bytes_TB.new_zeros(len(bytes_TB), num_words * WORD_BYTES)
    padded[:, : bytes_TB.shape[1]] = bytes_TB
    return padded.view(torch.int32)
