"""Ctrl-C that is never lost.

Python drops an exception that is raised inside a garbage collection callback, and JAX installs one: a KeyboardInterrupt
that lands there vanishes, and the program runs on. So the signal is remembered too, and looked at between tokens.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType

_seen = threading.Event()


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Remember Ctrl-C for `until_interrupted`, inside the block; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        _seen.set()
        raise KeyboardInterrupt

    _seen.clear()
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _seen.clear()


def until_interrupted[T](events: Iterable[T]) -> Iterator[T]:
    """The events; raises KeyboardInterrupt after a Ctrl-C, even if the first one was dropped."""
    for event in events:
        if _seen.is_set():
            raise KeyboardInterrupt
        yield event
