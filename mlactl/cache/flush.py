"""Getting many new files onto the disk: one flush of their filesystem where that is as good as one of each file."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlactl.cache.roots import filesystem

_WHOLE = frozenset({"btrfs", "ext4", "xfs"})
"""Filesystems of which syncfs(2) is known to write everything, files and names; a network or FUSE one may do nothing."""


@contextmanager
def below(root: str) -> Iterator[Callable[[Iterable[str]], None]]:
    """Gives a function that returns once these files' contents, or the names in these folders, all below `root`, are on the disk.

    Entered before the first of them is written, so that no write error is missed; the function raises OSError for one.
    """
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    whole = filesystem(Path(root)) in _WHOLE and _reports_errors()

    def flush(paths: Iterable[str]) -> None:
        if whole and _syncfs(fd):
            return
        for path in paths:
            _sync(path, os.O_NOFOLLOW)

    try:
        yield flush
    finally:
        os.close(fd)


def folder(path: str) -> None:
    """Flushes the names in a folder; raises OSError."""
    _sync(path, os.O_DIRECTORY)


def _sync(path: str, flag: int) -> None:
    fd = os.open(path, os.O_RDONLY | flag | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _reports_errors() -> bool:
    """Whether syncfs says that a write failed: since Linux 5.8."""
    major, _, rest = os.uname().release.partition(".")
    minor = rest.partition(".")[0]
    return major.isdigit() and minor.isdigit() and (int(major), int(minor)) >= (5, 8)


def _syncfs(fd: int) -> bool:
    """Flushes the filesystem of a descriptor; False where there is no such call, OSError where it failed."""
    try:
        call = ctypes.CDLL(None, use_errno=True).syncfs
    except AttributeError:
        return False
    if call(fd) == 0:
        return True
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))
