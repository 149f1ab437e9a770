"""Waiting for a lock and saying so: a second in silence is short enough for whoever holds it to be done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from mlactl.cache.locks import Lease, LockBusy

_SILENT_S = 1.0


@contextmanager
def held(lock: Callable[[float], AbstractContextManager[Lease]], wait_s: float, on_wait: Callable[[str], None]) -> Iterator[Lease]:
    """Holds for a block the lock that `lock` takes within the seconds it is given, `wait_s` more than one at most.

    Who holds it is told to `on_wait` after a second. Raises LockBusy, at once for what only readers hold: they keep it.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        try:
            lease = stack.enter_context(lock(_SILENT_S))
        except LockBusy as busy:
            if time.monotonic() - began < _SILENT_S:
                raise
            on_wait(busy.message)
            lease = stack.enter_context(lock(wait_s))
        yield lease
