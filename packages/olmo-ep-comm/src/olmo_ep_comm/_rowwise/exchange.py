"""The order of a one-sided exchange, for every rank of the group that lives in this process.

Shapes: T tokens, K slots, R ranks, C rows, D width; lists have one entry for each of these ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from olmo_ep_comm._codec import PackedRows, PairCodec, pack_rows, unpack_rows

from .form import WORD_BYTES, Form
from .leases import LeasePool
from .memory import Memory, Shared
from .plan import Admit, SourcePlan, count_requests, keep_requests, plan_source, row_ends


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Settings:
    """What an exchange does beside its form.

    Attributes:
        form: The sizes.
        admit: The policy of limited room, None to keep everything.
        codec: How tokens travel.
        backward_codec: How the gradients of results travel.
        moves: The module of moves: `moves`, or the kernels.
    """

    form: Form
    admit: Admit | None
    codec: PairCodec | None
    backward_codec: PairCodec | None
    moves: Any


class Buffers:
    """The buffers of one dispatcher, allocated once, and what is leased of them."""

    def __init__(self, settings: Settings, memory: Memory) -> None:
        form = settings.form
        self.settings = settings
        self.memory = memory
        shared = {name: memory.allocate(*shape) for name, shape in form.shapes().items()}
        self.rows: list[Shared] = [shared[f"rows {i}"] for i in range(form.live_forwards)]
        self.gradients, self.sums = shared["gradients"], shared["sums"]
        self.meta, self.weights, self.counts = (
            shared[name] for name in ("meta", "weights", "counts")
        )
        self.pool = LeasePool(form.live_forwards)


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
        lease, holder = buffers.pool.take()
        self._lease = lease
        self.leases: tuple[Tensor, ...] = (holder,)

    def send_tokens(
        self, tokens: list[Tensor], weights: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Exchange counts, plan, and write tokens and weights into the ranks of the experts."""
        buffers, form, moves = self._buffers, self._form, self._moves
        packed = [self._pack(buffers.settings.codec, x_TD) for x_TD in tokens]
        ranks = buffers.memory.ranks
        for rank, ids_TK in zip(ranks, self._ids, strict=True):
            counts_E = count_requests(ids_TK, form.num_experts)
            moves.put_counts(buffers.counts, rank, counts_E, self._lease)
        buffers.memory.barrier()
        for i, rank in enumerate(ranks):
            counts_RE = buffers.counts.own[i]
            kept_SQL = keep_requests(counts_RE[:, : form.num_experts], form, buffers.settings.admit)
            plan = plan_source(self._ids[i], kept_SQL, rank, form)
            words_TW = _words(tokens[i], packed[i], form.token_words)
            moves.put_rows(buffers.rows, counts_RE[:, form.num_experts], words_TW, plan)
            moves.put_meta(buffers.meta, rank, weights[i], plan, form)
            self.plans.append(plan)
            self.ends.append(row_ends(kept_SQL, rank))
            self._num_rows.append(self.ends[i][-1])
        buffers.memory.barrier()
        self._ids = []
        rows, row_weights = [], []
        for i in range(len(ranks)):
            meta_C4 = buffers.meta.own[i].clone()  # the next dispatch writes the buffer anew
            words_CW = buffers.rows[self._lease].own[i]
            moves.fan_out(words_CW, words_CW, meta_C4, self._num_rows[i])
            self._meta.append(meta_C4)
            row_weights.append(meta_C4[:, 3].contiguous().view(torch.float32))
            rows.append(self._unpack(words_CW, packed[i], buffers.settings.codec, keep=True))
        return rows, row_weights

    def sum_results(self, results: list[Tensor]) -> list[Tensor]:
        """Write the sums of each rank to the ranks of the tokens, and add them up there."""
        self._buffers.memory.barrier()
        self._put_sums(results)
        self._buffers.memory.barrier()
        return self._add_sums()

    def return_gradients(
        self, grad_rows: list[Tensor], grad_row_weights: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Bring home the gradients of tokens, as results, and of weights, each to its slot."""
        buffers, form = self._buffers, self._form
        buffers.memory.barrier()
        self._put_sums(grad_rows)
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
            first_R = torch.zeros_like(buffers.counts.own[i][:, 0])
            self._moves.put_rows([buffers.gradients], first_R, words_TW, plan)
        buffers.memory.barrier()
        rows = []
        for i, words_CW in enumerate(buffers.gradients.own):
            out_CW = torch.empty_like(words_CW)
            self._moves.fan_out(words_CW, out_CW, self._meta[i], self._num_rows[i])
            rows.append(self._unpack(out_CW, packed[i], codec, keep=False))
        return rows

    def _put_sums(self, values: list[Tensor]) -> None:
        for i, y_CD in enumerate(values):
            self._moves.put_sums(
                self._buffers.sums, y_CD.contiguous(), self._meta[i], self._num_rows[i], self._form
            )

    def _add_sums(self) -> list[Tensor]:
        pairs = zip(self._buffers.sums.own, self.plans, strict=True)
        return [self._moves.add_sums(sums, plan.num_sums_T, self._form) for sums, plan in pairs]

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


def _words(x_TD: Tensor, packed: PackedRows | None, num_words: int) -> Tensor:
    """Return the rows that travel, (T, W) int32: packed ones padded to whole words."""
    if packed is None:
        return x_TD.contiguous().view(torch.int32)
    bytes_TB = packed.bytes_NB
    padded = bytes_TB.new_zeros(len(bytes_TB), num_words * WORD_BYTES)
    padded[:, : bytes_TB.shape[1]] = bytes_TB
    return padded.view(torch.int32)
