"""Faults of one rank that all must hear of: they travel with the counts of a dispatch.

A rank that raised alone would leave the others waiting for its rows. On a CPU every rank reads the
counts and raises the same; on a GPU, where the host reads nothing, an assertion on the device ends
all of them.

Shapes: R ranks, W words of counts a rank, E experts, Q destination ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from olmo_ep_comm._checks import refused_elsewhere_error, unknown_ids_error

from .memory import Memory, Shared
from .sizes import Form


class Faults:
    """Puts faults into the counts, and finds those of others there.

    Args:
        form: The sizes.
        memory: Whose ranks these are.
        counts: The buffer of counts.
        drops: Whether a policy drops what has no room.
    """

    def __init__(self, form: Form, memory: Memory, counts: Shared, *, drops: bool) -> None:
        self._form = form
        self._memory = memory
        self._counts = counts
        # Tokens that name an expert twice could bring more routes than a dropless form has rows.
        self._can_overflow = not drops and not form.holds_all_routes

    @contextmanager
    def telling_others(self) -> Iterator[None]:
        """Within, before the counts of a dispatch, a fault of this rank is one of all ranks.

        The others find it with the counts, so that they raise and do not wait for this rank.
        """
        try:
            yield
        except Exception:
            self._put()
            raise

    def assert_none(self, is_sound: Tensor, counts_RW: Tensor) -> None:
        """On a GPU, end all ranks by an assertion if any found a fault; nothing is read.

        Args:
            is_sound: 0-d bool: neither this rank's ids nor the counts of others have a fault.
            counts_RW: The counts of all ranks.
        """
        unknown = unknown_ids_error(self._form.num_experts)
        torch._assert_async(
            is_sound,
            f"{unknown} The id is on this rank or on another one of its group; or another one "
            "refused its input and says why.",
        )
        if self._can_overflow:
            torch._assert_async(self._has_room(counts_RW), str(self._overflow_error()))

    def raise_any(self) -> None:
        """On a CPU, raise on every rank if any found a fault; reads the counts.

        Raises:
            ValueError: Of this rank's ids if one of them is unknown, else naming the ranks; or of
                routes without room in a dispatcher that drops none.
        """
        counts_RW = self._counts.own[0]
        faults_R = counts_RW[:, self._form.fault_column].tolist()
        has_room = not self._can_overflow or bool(self._has_room(counts_RW))
        if has_room and not any(faults_R):
            return
        self._memory.barrier()  # the next counts are written when all have read these
        if any(faults_R[rank] for rank in self._memory.ranks):
            raise unknown_ids_error(self._form.num_experts)
        if any(faults_R):
            raise refused_elsewhere_error([rank for rank, fault in enumerate(faults_R) if fault])
        raise self._overflow_error()

    def _put(self) -> None:
        row_W = torch.zeros(self._form.count_words, dtype=torch.int32, device=self._memory.device)
        row_W[self._form.fault_column] = 1
        for rank in self._memory.ranks:
            for buffer in self._counts.every:
                buffer[rank].copy_(row_W)
        self._memory.barrier()
        if self._memory.device.type == "cpu":  # on a GPU the others end here
            self._memory.barrier()

    def _has_room(self, counts_RW: Tensor) -> Tensor:
        """Return a 0-d bool tensor: whether every rank has rows for all routes to it."""
        R = self._form.num_ranks
        requested_RE = counts_RW[:, : self._form.num_experts]
        requested_Q = requested_RE.reshape(R, R, -1).sum((0, 2))
        return (requested_Q <= self._form.capacity).all()

    def _overflow_error(self) -> ValueError:
        return ValueError(
            "`expert_ids_TK` must bring a rank at most as many routes as when no token names an "
            f"expert twice, {self._form.capacity}, got more; name each expert once, or give "
            "`capacity` and `admit`."
        )
