"""Ctrl-C between steps instead of within them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[None]:
    """Holds Ctrl-C back until a step is done: a removed entry is then counted, and the compiler's libraries, which crash when
    they are interrupted while they are being imported, are left alone. Only the main thread gets signals; elsewhere this does nothing."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(held[0], None)
