"""The messages of one pass over the schedule, as one rank sees them.

A receive is posted when its action comes up, on each channel in the order of the sender's sends,
whatever the order of use. Not earlier: on CUDA a receive is a kernel that spins until its message
comes, and CUDA may hold back whatever loads a kernel or allocates memory behind it. A first forward
that loads its kernels behind the receive of its own gradient would wait for ever.

Sends are started and left alone; their tensor is kept until the message has arrived. No
acknowledgement is sent for that: a message from rank b that b produced at position p of its list
proves that everything b used at positions up to p has arrived.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._announcement import Announcement
from ._channels import Channel
from ._message_plan import Message, Rows, list_messages


class _Sent(NamedTuple):
    message: Message
    work: dist.Work
    tensor: Tensor  # kept alive while the transfer reads it


class Exchange:
    """Sends and receives for the actions of one rank.

    Args:
        channels: The open channels of this rank.
        rows: The actions of all ranks.
        rank_of_stage: The rank that holds each stage.
        rank: This rank.
        allocate: From a microbatch's index to an uninitialised tensor shaped like its activation.
        announcement: What to send ahead on each channel and to expect there; None for nothing.
    """

    def __init__(
        self,
        channels: Mapping[tuple[int, int], Channel],
        rows: Rows,
        rank_of_stage: Sequence[int],
        *,
        rank: int,
        allocate: Callable[[int], Tensor],
        announcement: Announcement | None = None,
    ) -> None:
        self._channels = channels
        self._allocate = allocate
        messages = list_messages(rows, rank_of_stage)
        self._outgoing = {m.sent_at: m for m in messages if m.source == rank}
        incoming = [m for m in messages if m.destination == rank]
        self._unposted: dict[int, deque[Message]] = {m.source: deque() for m in incoming}
        for message in incoming:  # in the order of the source's sends
            self._unposted[message.source].append(message)
        self._incoming = {message.used_at: message for message in incoming}
        self._posted: dict[Message, tuple[dist.Work | None, Tensor]] = {}
        self._in_flight: list[_Sent] = []
        self._announcement = announcement
        self._announced: dict[int, tuple[dist.Work, Tensor]] = {}  # by destination
        self._heard: set[int] = set()  # sources

    def receive(self, position: int) -> Tensor | None:
        """Return the tensor for the action at `position`, or None if it takes no message."""
        message = self._incoming.get(position)
        if message is None:
            return None
        self._post(message)
        work, tensor = self._posted.pop(message)
        if work is not None:
            work.wait()
            self._free_arrived(message)
        return tensor

    def send(self, position: int, tensor: Tensor) -> bool:
        """Start to send what the action at `position` made; False if no other rank takes it."""
        message = self._outgoing.get(position)
        if message is None:
            return False
        if tensor.numel():
            tensor = tensor.contiguous()
            self._announce(message)
            work = self._channels[message.source, message.destination].send(tensor)
            self._in_flight.append(_Sent(message, work, tensor))
        return True

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for sent in self._in_flight:
            self._free(sent)
        self._in_flight = []
        for work, _ in self._announced.values():
            work.wait()
        self._announced = {}

    def _announce(self, message: Message) -> None:
        if self._announcement is not None and message.destination not in self._announced:
            channel = self._channels[message.source, message.destination]
            header = self._announcement.to_tensor()
            self._announced[message.destination] = channel.send(header), header

    def _hear(self, message: Message) -> None:
        if self._announcement is not None and message.source not in self._heard:
            self._heard.add(message.source)
            header = torch.empty(len(self._announcement), dtype=torch.int64)
            self._channels[message.source, message.destination].receive(header).wait()
            self._announcement.check(header, message.source)

    def _post(self, message: Message) -> None:
        unposted = self._unposted[message.source]
        while message not in self._posted and unposted:
            following = unposted.popleft()
            tensor = self._allocate(following.microbatch)
            channel = self._channels[following.source, following.destination]
            # Both ends know the shape, so a tensor without elements need not travel.
            work = None
            if tensor.numel():
                self._hear(following)
                work = channel.receive(tensor)
            self._posted[following] = (work, tensor)

    def _free_arrived(self, received: Message) -> None:
        kept = []
        for sent in self._in_flight:
            arrived = (
                sent.message.destination == received.source
                and sent.message.used_at <= received.sent_at
            )
            if arrived:
                self._free(sent)
            else:
                kept.append(sent)
        self._in_flight = kept

    def _free(self, sent: _Sent) -> None:
        """Complete a send; from here on its tensor may be overwritten."""
        sent.work.wait()
