"""Replays captures in worker processes; one that dies takes only its own capture with it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(work: Callable[[Item], Result], items: Sequence[Item], jobs: int, lost: Callable[[Item], Result]) -> Iterator[Result]:
    """The result of each item, in order, from `jobs` processes; `lost(item)` for one whose process was killed.

    A killed worker breaks its whole pool without saying whose it was: what had no result yet is then done one by one.
    """
    # Spawned, because a forked child of a process that used CUDA or OpenMP threads hangs.
    pool = _pool(min(jobs, len(items)))
    try:
        futures = [pool.submit(work, item) for item in items]
        for place, future in enumerate(futures):
            try:
                made = future.result()
            except BrokenProcessPool:
                yield from _alone(work, items[place:], futures[place:], lost)
                return
            yield made
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _alone(
    work: Callable[[Item], Result], items: Sequence[Item], earlier: Sequence[Future[Result]], lost: Callable[[Item], Result]
) -> Iterator[Result]:
    pool = _pool(1)
    try:
        for item, future in zip(items, earlier, strict=True):
            if future.done() and future.exception() is None:
                yield future.result()
                continue
            try:
                made = pool.submit(work, item).result()
            except BrokenProcessPool:
                pool.shutdown(wait=True)
                pool = _pool(1)
                made = lost(item)
            yield made
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
