"""Reads what the checks need of each shard, shards in parallel, each worker with one small buffer.

numpy and the reads release the interpreter's lock, so threads are enough; memory does not grow with the checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from threading import Event, Lock

from mlactl.scales.blocks import BlockCounts, BlockScanner, Truncated, first_bad_float, read_floats
from mlactl.scales.files import open_regular
from mlactl.scales.header import Tensor

MAX_WORKERS = 8
REPORT_BYTES = 16 * 2**20
"""Progress is told in steps of this size: a bar need not be drawn for every buffer."""

Progress = Callable[[str, int, str], AbstractContextManager[Callable[[int], None]]]
"""Given a title, a total and its unit ("bytes" or "files"), a context whose value is told of what is done, one thread at a time."""


@dataclass(slots=True)
class Work:
    """What to read of one shard: E4M3 tensors to scan, short float tensors to read, long ones to check."""

    blocks: list[Tensor] = field(default_factory=list)
    scalars: list[Tensor] = field(default_factory=list)
    floats: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class Readings:
    """What was read, by tensor name. `bad_floats` has flat index and value; `failures` files that could not be read on."""

    blocks: dict[str, BlockCounts] = field(default_factory=dict)
    scalars: dict[str, list[float]] = field(default_factory=dict)
    bad_floats: dict[str, tuple[int, float]] = field(default_factory=dict)
    failures: list[tuple[Path, str]] = field(default_factory=list)


class _Stopped(Exception):
    """The person pressed Ctrl-C, or another worker met what nobody foresaw."""


def no_progress(_title: str, _total: int, _unit: str) -> AbstractContextManager[Callable[[int], None]]:
    """A progress that tells nobody."""
    return nullcontext(lambda _: None)


def read_all(files: Sequence[Path], work: Sequence[Work], progress: Progress = no_progress) -> Readings:
    """Reads `work[i]` of `files[i]`. A file that fails is in `failures`, the others are read all the same."""
    made, lock, stop = Readings(), Lock(), Event()
    total = sum(tensor.size_bytes for item in work for tensor in (*item.blocks, *item.floats))
    with progress("scanning block scales", total, "bytes") as on_bytes:

        def report(done: int) -> None:
            if stop.is_set():
                raise _Stopped
            with lock:
                on_bytes(done)

        workers = max(1, min(len(files), len(os.sched_getaffinity(0)), MAX_WORKERS))
        with ThreadPoolExecutor(workers, thread_name_prefix="scan") as pool:
            try:
                futures = [pool.submit(_read_shard, path, item, report) for path, item in zip(files, work, strict=True)]
                for future in futures:
                    _merge(made, future.result())
            except BaseException:
                # Without this Ctrl-C would wait for every shard to be read to its end.
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
    return made


def _read_shard(path: Path, work: Work, report: Callable[[int], None]) -> Readings:
    made = Readings()
    if not (work.blocks or work.scalars or work.floats):
        return made
    pending = 0

    def count(done: int) -> None:
        nonlocal pending
        pending += done
        if pending >= REPORT_BYTES:
            report(pending)
            pending = 0

    try:
        with open_regular(path) as (descriptor, _):
            _read_tensors(descriptor, work, made, count)
    except (Truncated, OSError) as error:
        made.failures.append((path, str(error)))
    report(pending)
    return made


def _read_tensors(descriptor: int, work: Work, made: Readings, count: Callable[[int], None]) -> None:
    for tensor in sorted(work.scalars, key=lambda item: item.begin):
        made.scalars[tensor.name] = read_floats(descriptor, tensor, 0, prod(tensor.shape)).tolist()
    for tensor in work.floats:
        bad = first_bad_float(descriptor, tensor)
        if bad is not None:
            made.bad_floats[tensor.name] = bad
        count(tensor.size_bytes)
    scanner = BlockScanner()
    for tensor in sorted(work.blocks, key=lambda item: item.begin):
        made.blocks[tensor.name] = scanner.scan(descriptor, tensor, count)


def _merge(made: Readings, part: Readings) -> None:
    made.blocks.update(part.blocks)
    made.scalars.update(part.scalars)
    made.bad_floats.update(part.bad_floats)
    made.failures += part.failures
