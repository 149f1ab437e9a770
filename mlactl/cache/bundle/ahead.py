"""Work on many entries in another thread: writing files runs without the interpreter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")

MAX_BYTES = 32 << 20
"""What entries that are under way may hold together; more than that has the next one wait."""


def in_order(pool: Executor, jobs: Iterable[tuple[int, Callable[[], T]]], ahead: int) -> Iterator[T]:
    """Results of jobs in their order, each given with the bytes it holds; the next is asked for when fewer than `ahead` and 32 MiB are under way.

    What a job raises comes out in its place.
    """
    waiting: deque[tuple[int, Future[T]]] = deque()
    held = 0
    for size, job in jobs:
        waiting.append((size, pool.submit(job)))
        held += size
        while len(waiting) >= ahead or held > MAX_BYTES:
            done, result = waiting.popleft()
            held -= done
            yield result.result()
    while waiting:
        yield waiting.popleft()[1].result()
