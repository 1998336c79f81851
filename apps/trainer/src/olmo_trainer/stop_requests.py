"""Ctrl-C and SIGTERM as a request to save and stop, not a blow."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Turn Ctrl-C and SIGTERM into a request to save after the step in hand; a second one kills."""
    event = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        signal.signal(number, previous[number])
        event.set()

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
