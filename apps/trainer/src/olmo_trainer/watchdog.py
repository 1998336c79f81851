"""Names the rank that the others wait for, and ends the run: a hang becomes an error.

Each rank beats as it works (`beat`, some ten times a step) and publishes the last beat, where it is
and how long it has been there, every few seconds from a thread, to the store that the ranks met at.
A rank whose own beat is older than its patience reads what all have published and accuses

1. the silent: processes that publish no more (killed, stopped, cut off);
2. else the ranks that have come least far, by step and phase;
3. else, where all are as far, those that stand elsewhere than in a collective.

Then it ends its process, at once: the main thread may stand in a collective for ever, where no
exception reaches it. What has been saved stands, and a launcher starts the run again.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType

import torch
import torch.distributed as dist

from olmo_trainer.phases import PHASES

_ORDER = ("begin", *PHASES, "evaluate", "save", "end")
_SLOW_PHASES = ("begin", "save", "end")
_SLOW_FACTOR = 10.0
EXIT_CODE = 1
_LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (os.__file__, torch.__file__))


@dataclass(frozen=True, slots=True)
class Sign:
    """What a rank says of itself."""

    rank: int
    tick: int  # how many times it has spoken
    step: int
    phase: str
    seconds: float  # since its last beat
    waits: bool  # in a collective
    place: str  # the main thread's innermost line outside torch
    host: str
    process: int
    leaves: bool = False  # it has accused, and ends

    @property
    def progress(self) -> tuple[int, int]:
        """How far it has come."""
        return self.step, _ORDER.index(self.phase)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ({self.host}, process {self.process}): in step {self.step}, "
            f"{self.phase}, for {self.seconds:.0f} s, at {self.place}"
        )


class Watchdog:
    """Watches this rank and reads the others' signs; a context manager around training.

    Args:
        rank: Of this process.
        world: How many ranks there are.
        store: Where signs are published, a client of its own; `None` in a run of one process.
        patience: Seconds without a beat that are too many; 0 never ends anything. Beginning (the
            first step included, which may compile), saving and ending may take ten times as long.
        end: Is given the message and ends the process; for tests.
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        store: dist.Store | None,
        patience: float,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._rank, self._world, self._store = rank, world, store
        self._patience = patience
        self._interval = min(5.0, max(patience / 20, 0.05))
        self._end = end or _end
        self._beat = (0, "begin", time.monotonic())
        self._first: int | None = None
        self._tick = 0
        self._stop = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def beat(self, step: int, phase: str) -> None:
        """Say that this rank has come to `phase` of step `step`; costs next to nothing."""
        self._beat = (step, phase, time.monotonic())
        if self._first is None and phase == PHASES[0]:
            self._first = step

    def __enter__(self) -> "Watchdog":
        self._main = threading.get_ident()
        if self._patience:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._patience:
            self._thread.join(2 * self._interval)

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            own = self._publish()
            begins = self._first is None or own.step <= self._first
            factor = _SLOW_FACTOR if begins or own.phase in _SLOW_PHASES else 1.0
            if own.seconds > factor * self._patience:
                self._accuse()
                return

    def _publish(self, *, leaves: bool = False) -> Sign:
        step, phase, since = self._beat
        self._tick += 1
        waits, place = _place_of(self._main)
        own = Sign(
            *(self._rank, self._tick, step, phase, time.monotonic() - since, waits, place),
            *(socket.gethostname(), os.getpid(), leaves),
        )
        if self._store is not None:
            try:
                self._store.set(f"sign/{self._rank}", json.dumps(asdict(own)))
            except RuntimeError:  # whoever holds the store is gone: nobody hears, for now
                self._store = None
        return own

    def _signs(self) -> list[Sign | None]:
        signs: list[Sign | None] = [None] * self._world
        for rank in range(self._world):
            key = f"sign/{rank}"
            if self._store is not None and self._store.check([key]):
                signs[rank] = Sign(**json.loads(self._store.get(key)))
        return signs

    def _accuse(self) -> None:
        try:
            before = self._signs()
            listening = time.monotonic() + max(3 * self._interval, 1.0)
            while time.monotonic() < listening:  # whoever lives speaks twice, this rank too
                time.sleep(self._interval)
                self._publish()
            own = self._publish(leaves=True)
            after = self._signs()
        except RuntimeError:
            own, before, after = self._publish(), [None] * self._world, [None] * self._world
        if self._stop.is_set():
            return
        after[self._rank] = own
        silent = {
            rank
            for rank, (old, new) in enumerate(zip(before, after, strict=True))
            if rank != self._rank
            and (new is None or (not new.leaves and old is not None and old.tick == new.tick))
        }
        culprits, message = accuse(after, silent)
        speaker = min(set(range(self._world)) - silent)
        self._end(message if self._rank == speaker or self._rank in culprits else "")


def accuse(signs: Sequence[Sign | None], silent: set[int]) -> tuple[list[int], str]:
    """Return the ranks that the others wait for, and the words for it.

    Args:
        signs: The last sign of each rank; `None` for one that was never heard.
        silent: Ranks whose signs have stopped.
    """
    heard = [sign for sign in signs if sign is not None and sign.rank not in silent]
    seconds = max((sign.seconds for sign in heard), default=0.0)
    begin = f"no progress for {seconds:.0f} s, so the run ends"
    if silent:
        words = [
            f"rank {rank} was never heard"
            if (sign := signs[rank]) is None
            else f"{sign}, and silent since"
            for rank in sorted(silent)
        ]
        return sorted(silent), f"{begin}; silent: {'; '.join(words)}"
    least = min(sign.progress for sign in heard)
    late = [sign for sign in heard if sign.progress == least]
    # Among those that are least far, who waits is not who is waited for.
    late = [sign for sign in late if not sign.waits] or late
    if len(late) == len(heard) > 1:
        return [], f"{begin}; every rank stands at the same place: {'; '.join(map(str, heard))}"
    others = len(heard) - len(late)
    rest = f"; waiting for it: {others} of {len(signs)} ranks" if others else ""
    return [sign.rank for sign in late], f"{begin}; slow: {'; '.join(map(str, late))}{rest}"


def _place_of(thread: int) -> tuple[bool, str]:
    """Return whether a thread stands in a collective, and its innermost line that says something.

    That is one outside torch and the standard library, if there is one.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return False, "its end"
    stack = traceback.extract_stack(frame)
    waits = any("torch/distributed/" in line.filename.replace(os.sep, "/") for line in stack)
    own = [line for line in stack if not line.filename.startswith(_LIBRARIES)]
    line = (own or stack)[-1]
    return waits, f"{os.path.basename(line.filename)}:{line.lineno} in {line.name}: {line.line}"


def _end(message: str) -> None:
    if message:
        os.write(2, f"\nerror: {message}\n".encode())
    os._exit(EXIT_CODE)
