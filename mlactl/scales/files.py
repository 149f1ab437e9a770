"""Opening what a person pointed at: regular files only, never a wait on a pipe, and reasons in words."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlactl.errors import CannotRun
from mlactl.scales.findings import plain
from mlactl.scales.strict_json import MAX_JSON_BYTES

HASH_BLOCK_BYTES = 1 << 20


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, int]]:
    """(descriptor, size in bytes) of a regular file; raises CannotRun for anything else."""
    try:
        # O_NONBLOCK: on a pipe that nobody writes to a plain open would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise CannotRun(f"{plain(path)}: is {_kind_of(state.st_mode)}, expected a file", hint=f"ls -ld {plain(path)}")
        yield descriptor, state.st_size
    finally:
        os.close(descriptor)


def read_bytes(path: Path, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Every byte of a small file; raises CannotRun when it cannot be read or has more than `limit_bytes`."""
    with open_regular(path) as (descriptor, size):
        if size > limit_bytes:
            raise CannotRun(
                f"{plain(path)}: {size} bytes, expected at most {limit_bytes} of JSON",
                hint="name a checkpoint's files *.safetensors to have them scanned",
            )
        try:
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read(limit_bytes)
        except OSError as error:
            raise unreadable(path, error) from error


def first_bytes(path: Path, count: int) -> bytes:
    """At most `count` bytes from the start of a file; raises CannotRun."""
    with open_regular(path) as (descriptor, _):
        try:
            return os.pread(descriptor, count, 0)
        except OSError as error:
            raise unreadable(path, error) from error


def sha256_of(path: Path) -> str:
    """The digest of a file of any size, read in blocks; raises CannotRun."""
    import hashlib

    digest = hashlib.sha256()
    with open_regular(path) as (descriptor, _):
        try:
            with os.fdopen(descriptor, "rb", closefd=False, buffering=0) as file:
                while block := file.read(HASH_BLOCK_BYTES):
                    digest.update(block)
        except OSError as error:
            raise unreadable(path, error) from error
    return digest.hexdigest()


def unreadable(path: Path, error: OSError | ValueError) -> CannotRun:
    """The error for a path that the system refuses."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return CannotRun(f"{plain(path)}: {(reason or str(error)).lower()}", hint=f"ls -ld {plain(path)}")


def _kind_of(mode: int) -> str:
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((words for test, words in kinds if test(mode)), "no regular file")
