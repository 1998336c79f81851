"""What all ranks of a one-sided exchange agree on, and the memory that it takes."""

from dataclasses import dataclass
from typing import Literal

import torch

WORD_BYTES = 4
ALIGN_BYTES = 16
META_WORDS = 4
"""Words that travel with each row: next row of its token, route, slot of the sum, weight."""
PLAN_WORDS = 4
"""Words that are kept of each route: rank, row, next row, slot of the sum."""

CombineBy = Literal["put", "get"]
"""Who moves the sums: the rank of the experts writes them, or that of the tokens fetches them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Sizes of an exchange.

    Attributes:
        num_ranks: Ranks of the group.
        num_experts: Experts of the whole group.
        max_tokens: Most tokens of one rank.
        width: Values of a token.
        top_k: Slots of a token.
        dtype: Of tokens, rows and results.
        capacity: Rows that a rank can receive.
        scale_bytes: Bytes of scales of an encoded token, None if tokens travel as they are.
        gradient_scale_bytes: The same for the gradients of results.
        live_forwards: Receive buffers.
        combine_by: Who moves the sums.
    """

    num_ranks: int
    num_experts: int
    max_tokens: int
    width: int
    top_k: int
    dtype: torch.dtype
    capacity: int
    scale_bytes: int | None
    gradient_scale_bytes: int | None
    live_forwards: int
    combine_by: CombineBy

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.num_ranks

    @property
    def sums_a_token(self) -> int:
        """Most ranks that send a sum to one token."""
        return min(self.num_ranks, self.top_k)

    @property
    def holds_all_routes(self) -> bool:
        """Whether a rank has room for whatever the others send, experts named twice included."""
        return self.capacity >= self.num_ranks * self.max_tokens * self.top_k

    @property
    def token_words(self) -> int:
        """Words of a token as it travels."""
        return self._words(self.scale_bytes)

    @property
    def gradient_words(self) -> int:
        """Words of a gradient of results as it travels."""
        return self._words(self.gradient_scale_bytes)

    @property
    def count_words(self) -> int:
        """Words of the counts of a rank: a count an expert, of faults, and a lease."""
        return self.num_experts + 2

    @property
    def fault_column(self) -> int:
        """Where the faults of a rank are: ids that are no expert's, or 1 for refused input."""
        return self.num_experts

    @property
    def lease_column(self) -> int:
        """Where the receive buffer is that a rank has free."""
        return self.num_experts + 1

    def _words(self, scale_bytes: int | None) -> int:
        if scale_bytes is None:
            return self.width * self.dtype.itemsize // WORD_BYTES
        return -(-(self.width + scale_bytes) // ALIGN_BYTES) * ALIGN_BYTES // WORD_BYTES

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each buffer of a rank that other ranks write into or read.

        Sums that are fetched share the buffer of gradients: no exchange needs both.
        """
        rows, word = self.capacity, torch.int32
        sums = {"sums": ((self.max_tokens * self.sums_a_token, self.width), self.dtype)}
        gradient_words = self.gradient_words
        if self.combine_by == "get":
            sums = {}
            gradient_words = max(gradient_words, self._words(None))
        receive = {
            f"rows {lease}": ((rows, self.token_words), word) for lease in range(self.live_forwards)
        }
        return {
            **receive,
            "gradients": ((rows, gradient_words), word),
            **sums,
            "meta": ((rows, META_WORDS), word),
            "weights": ((self.max_tokens * self.top_k,), torch.float32),
            "counts": ((self.num_ranks, self.count_words), word),
        }

    def buffer_bytes(self) -> dict[str, int]:
        """Return the bytes of each buffer of `shapes`."""
        sizes = {}
        for name, (shape, dtype) in self.shapes().items():
            size = dtype.itemsize
            for length in shape:
                size *= length
            sizes[name] = size
        return sizes

    def forward_bytes(self) -> int:
        """Return the bytes that a forward of `max_tokens` tokens holds until its backward.

        What its rows are and the weights of these, the plan of its routes and, with a codec, the
        decoded rows.
        """
        rows = META_WORDS * WORD_BYTES + WORD_BYTES
        if self.scale_bytes is not None:
            rows += self.width * self.dtype.itemsize
        plan = (PLAN_WORDS * self.top_k + 1) * WORD_BYTES
        return self.capacity * rows + self.max_tokens * plan


def dropless_capacity(num_ranks: int, num_experts: int, max_tokens: int, top_k: int) -> int:
    """Return the rows that a rank receives at most if no token names an expert twice."""
    return num_ranks * max_tokens * min(top_k, num_experts // num_ranks)
