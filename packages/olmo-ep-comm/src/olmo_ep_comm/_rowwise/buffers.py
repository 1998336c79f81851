"""The buffers of a one-sided exchange, and what is leased of them."""

from dataclasses import dataclass
from typing import Any

import torch

from olmo_ep_comm._pair_codec import PairCodec

from .faults import Faults
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
        self.faults = Faults(form, memory, self.counts, drops=settings.admit is not None)
        self.pool = LeasePool(form.live_forwards)
        self.first_R = torch.zeros(form.num_ranks, dtype=torch.int32, device=memory.device)
