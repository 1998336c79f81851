"""The buffers of a one-sided exchange, what is leased of them, and faults that travel in them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from olmo_ep_comm._checks import refused_elsewhere_error, unknown_ids_error
from olmo_ep_comm._codec import PairCodec

from .leases import LeasePool
from .memory import Memory, Stack
from .plan import Admit
from .sizes import Form


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
        self.rows = Stack([shared[f"rows {i}"] for i in range(form.live_forwards)])
        gradients = shared["gradients"]
        self.gradients = Stack([gradients.start((form.capacity, form.gradient_words), torch.int32)])
        self.sums = (
            shared["sums"]
            if form.combine_by == "put"
            else gradients.start((form.capacity, form.width), form.dtype)
        )
        self.meta, self.weights, self.counts = (
            shared[name] for name in ("meta", "weights", "counts")
        )
        self.pool = LeasePool(form.live_forwards)
        self.first_R = torch.zeros(form.num_ranks, dtype=torch.int32, device=memory.device)

    @contextmanager
    def telling_others(self) -> Iterator[None]:
        """Within, before the counts of a dispatch, a fault of this rank is one of all ranks.

        The others find it with the counts, so that they raise and do not wait for this rank.
        """
        try:
            yield
        except Exception:
            self._put_fault()
            raise

    def _put_fault(self) -> None:
        form = self.settings.form
        row_W = torch.zeros(form.count_words, dtype=torch.int32, device=self.memory.device)
        row_W[form.fault_column] = 1
        for rank in self.memory.ranks:
            for buffer in self.counts.every:
                buffer[rank].copy_(row_W)
        self.memory.barrier()
        if self.memory.device.type == "cpu":  # on a GPU the others end here
            self.memory.barrier()

    def fault_message(self) -> str:
        """Return what a GPU that met a fault says; it cannot say whose."""
        return (
            f"{unknown_ids_error(self.settings.form.num_experts)} The id is on this rank or on "
            "another one of its group; or another one refused its input and says why."
        )

    @property
    def can_overflow(self) -> bool:
        """Whether tokens that name an expert twice could drop routes where none may be dropped."""
        return self.settings.admit is None and not self.settings.form.holds_all_routes

    def overflow_error(self) -> ValueError:
        """Return the error for more routes to a rank than a dropless dispatcher has rows."""
        return ValueError(
            "`expert_ids_TK` must bring a rank at most as many routes as when no token names an "
            f"expert twice, {self.settings.form.capacity}, got more; name each expert once, or "
            "give `capacity` and `admit`."
        )

    def has_room(self, counts_RW: Tensor) -> Tensor:
        """Return a 0-d bool tensor: whether every rank has rows for all routes to it."""
        form = self.settings.form
        requested_RE = counts_RW[:, : form.num_experts]
        requested_Q = requested_RE.reshape(form.num_ranks, form.num_ranks, -1).sum((0, 2))
        return (requested_Q <= form.capacity).all()

    def raise_faults(self) -> None:
        """Raise on every rank if any found a fault; reads the counts.

        Raises:
            ValueError: Of this rank's ids if one of them is unknown, else naming the ranks; or of
                routes without room in a dispatcher that drops none.
        """
        form, ranks = self.settings.form, self.memory.ranks
        counts_RW = self.counts.own[0]
        faults_R = counts_RW[:, form.fault_column].tolist()
        has_room = not self.can_overflow or bool(self.has_room(counts_RW))
        if has_room and not any(faults_R):
            return
        self.memory.barrier()  # the next counts are written when all have read these
        if any(faults_R[rank] for rank in ranks):
            raise unknown_ids_error(form.num_experts)
        if any(faults_R):
            raise refused_elsewhere_error([rank for rank, fault in enumerate(faults_R) if fault])
        raise self.overflow_error()
