"""Ctrl-C, SIGTERM and a file as a request to save and stop, not a blow.

The file `stop` in a run's folder is for whoever has no signal that reaches the run, or needs longer
than a launcher waits after one (torchrun: 30 s). It stays, so that a script can tell a run that was
stopped from one that is over, until a process goes on with the run.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP = "stop"  # in a run's folder
SAME_SECONDS = 2.0


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Turn Ctrl-C and SIGTERM into a request to stop after the step in hand; a later one aborts.

    A launcher may pass on what the terminal has sent already: signals close together are one.
    """
    event, first = threading.Event(), 0.0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if not event.is_set():
            first = time.monotonic()
            event.set()
            if os.environ.get("RANK", "0") == "0":
                os.write(2, b"\nstopping after this step; once more to abort\n")
        elif time.monotonic() - first > SAME_SECONDS:
            raise KeyboardInterrupt

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    for number in previous:
        signal.signal(number, ask)
    try:
        yield event
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
