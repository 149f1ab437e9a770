"""Reading files that others may put anything in the place of: never through a link, never hanging on a FIFO, never without a limit."""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from mlactl.cache import locks, trust

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""NONBLOCK: a FIFO in a file's place must not hang us."""


def read_regular(path: str, limit: int, *, flags: int = READ_FLAGS, folder: int | None = None) -> tuple[bytes, os.stat_result]:
    """A regular file's bytes, at most `limit` + 1, and the status of the descriptor they were read on.

    Who needs it whole compares lengths, or uses `read_whole`. `folder` is a descriptor that `path` starts from. Raises OSError,
    for what is no regular file too.
    """
    fd = os.open(path, flags, dir_fd=folder)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, not_regular(info.st_mode), path)
        wanted = min(limit, info.st_size) + 1  # not `limit`: allocating that can cost more than the read
        data = os.read(fd, wanted)
        while len(data) < min(wanted, info.st_size) and (part := os.read(fd, wanted - len(data))):
            data += part
    finally:
        os.close(fd)
    return data, info


def read_whole(path: str, limit: int, *, flags: int = READ_FLAGS, folder: int | None = None) -> tuple[bytes, os.stat_result]:
    """`read_regular` of a file that can have `limit` bytes at most; a longer one is an OSError."""
    data, info = read_regular(path, limit, flags=flags, folder=folder)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"{info.st_size} bytes, more than the {limit} it can have", path)
    return data, info


_NOT_THE_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EISDIR, errno.EFBIG})


def withheld(error: OSError) -> bool:
    """Whether a file is there for all that is known and only its reading was refused or failed (EACCES, EIO, ESTALE), which says nothing
    of what is in it; not where there is none, or something else stands in its place."""
    return error.errno not in _NOT_THE_FILE


def refusal(path: str | os.PathLike[str], error: OSError) -> str:
    """`/path (owner alice (uid 1000), mode 0600) cannot be read: Permission denied`."""
    return f"{trust.describe(os.fspath(path))} cannot be read: {error.strerror or error}"


def out_of_reach(path: str | os.PathLike[str]) -> OSError | None:
    """Why it cannot be told whether there is a file of this name; None when it can be."""
    try:
        os.lstat(path)
    except OSError as error:
        return error if withheld(error) else None
    return None


def not_regular(mode: int) -> str:
    """What stands in a file's place: `not a regular file but a FIFO`."""
    return f"not a regular file but {locks.kind_of(mode)}"


def lock_holder(path: str) -> str | None:
    """Who holds a lock file right now, in words; None when nobody does, or it cannot be told."""
    try:
        fd = os.open(path, READ_FLAGS)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pids = locks.lockers(fd)
        return f"{path} is held by {f'process {pids[0]}' if pids else 'another process'}"
    except OSError:
        return None
    finally:
        os.close(fd)
    return None
