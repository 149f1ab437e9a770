"""Locks of a root: one compile per key, and which entries are in use. They are flock(2) locks, so a dead process holds none.

`<bucket>/<key>.lock` is held exclusively by a publisher or remover and shared by readers, until their process ends.
`v1/root.lock` is held shared by whoever holds an entry lock. Two take it exclusively, for seconds at most: an import,
which then publishes without a lock file for each entry, and `prune --locks`, to unlink lock files: one that is unlinked
while somebody opens it would let two processes hold "the" lock.
`v1/import.lock` is held exclusively by an import, so that its spool is nobody else's.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from mlactl.cache import trust
from mlactl.cache.roots import LAYOUT, Layer
from mlactl.errors import CannotRun

ROOT_LOCK = "root.lock"
IMPORT_LOCK = "import.lock"
LOCK_SUFFIX = ".lock"
BUCKET = re.compile(r"[0-9a-f]{2}")
LOCK_FILE = re.compile(r"[0-9a-f]{64}[.]lock")

_ROOT_WAIT_S = 10.0
"""The root's lock is held exclusively for seconds at most, so whoever would not wait for an entry's waits for that."""

_READERS_SEEN = 5
"""Polls in a row that must find only readers before a waiter gives up: another waiter's probe looks like a reader for microseconds."""


class Holder(msgspec.Struct, frozen=True):
    """Who holds a lock exclusively, as written into the lock file; `started` is when it took the lock, ISO 8601 UTC."""

    pid: int
    host: str
    started: str

    def label(self) -> str:
        """For messages: `process 4711 on node7 since 2026-11-30T12:00:00Z`."""
        return f"process {self.pid} on {self.host} since {self.started}"


class LockBusy(CannotRun):
    """A lock that somebody else holds; `holder` is None when it is held by readers or the file does not say."""

    def __init__(self, path: str, holder: Holder | None, message: str, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.path = path
        self.holder = holder


class NotALockFile(CannotRun):
    """Something else in a lock file's place, so that nothing can be locked."""


@dataclass(slots=True)
class Lease:
    """A held lock, its file first in `fds`. It lasts until `close` or until nobody refers to it."""

    fds: list[int]
    exclusive: bool
    owner: int

    def close(self) -> None:
        """Releases the lock; safe to call twice."""
        fds, self.fds = self.fds, []
        # An explicit unlock also unlocks what a forked child inherited; readers never do it, because a child that ends
        # would then unlock its parent.
        unlock = self.exclusive and self.owner == os.getpid()
        for number, fd in enumerate(fds):
            if unlock and number == 0:
                os.ftruncate(fd, 0)  # the name of a holder that is gone would mislead
            if unlock:
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def __del__(self) -> None:
        try:  # noqa: SIM105  contextlib may be gone as well
            self.close()
        except (AttributeError, TypeError):
            pass  # the interpreter is ending and its modules are gone; the kernel closes the files, which ends the lock


@contextmanager
def entry_lock(layer: Layer, key: str, *, exclusive: bool, wait_s: float, root: Lease | None = None) -> Iterator[Lease]:
    """Holds an entry's lock for a block; see `acquire_entry`. Whoever takes many gives the root's shared lock, which it keeps."""
    if root is None:
        lease = acquire_entry(layer, key, exclusive=exclusive, wait_s=wait_s)
    else:
        lease = _acquire(entry_lock_path(layer, key), exclusive=exclusive, wait_s=wait_s)
    try:
        yield lease
    finally:
        lease.close()


@contextmanager
def root_lock(layer: Layer, *, exclusive: bool = True, wait_s: float = 0.0) -> Iterator[Lease]:
    """Holds the lock of the whole root for a block; exclusively it means that no entry is locked by anybody."""
    lease = acquire_root(layer, exclusive=exclusive, wait_s=wait_s)
    try:
        yield lease
    finally:
        lease.close()


@contextmanager
def import_lock(layer: Layer, *, wait_s: float, on_wait: Callable[[str], None]) -> Iterator[Lease]:
    """Holds for a block the right to import into a root; who holds it is told to `on_wait` before it waits. Raises LockBusy."""
    path = f"{layer.folder()}/{IMPORT_LOCK}"
    try:
        lease = _acquire(path, exclusive=True, wait_s=0.0)
    except LockBusy as busy:
        on_wait(busy.message)
        lease = _acquire(path, exclusive=True, wait_s=wait_s)
    try:
        yield lease
    finally:
        lease.close()


def entry_lock_path(layer: Layer, key: str) -> str:
    """Path of an entry's lock file."""
    return f"{layer.bucket(key)}/{key}{LOCK_SUFFIX}"


def root_lock_path(layer: Layer) -> str:
    """Path of the root's lock file."""
    return f"{layer.folder()}/{ROOT_LOCK}"


def lock_files(layer: Layer) -> list[str]:
    """The entries' lock files of a layer, relative to its root (`v1/ab/<key>.lock`), in order; raises CannotRun for a folder that cannot be read."""
    if Path(layer.folder()).is_symlink():
        return []
    found = []
    for bucket in _items(layer.folder()):
        if BUCKET.fullmatch(bucket.name) and bucket.is_dir(follow_symlinks=False):
            names = [file.name for file in _items(bucket.path) if LOCK_FILE.fullmatch(file.name) and file.is_file(follow_symlinks=False)]
            found += [f"{LAYOUT}/{bucket.name}/{name}" for name in names if name.startswith(bucket.name)]
    return found


def _items(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda item: item.name)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CannotRun(f"{trust.describe(folder)} cannot be read: {error.strerror}", hint="mlactl cache dir shows which roots are used") from None


def acquire_entry(layer: Layer, key: str, *, exclusive: bool, wait_s: float) -> Lease:
    """Takes an entry's lock, creating the lock file if need be; the holder of an exclusive one is written into it.

    Raises LockBusy naming the lock and its holder when it is not free within `wait_s`, at once when only readers hold
    it (they keep it until their processes end), NotALockFile when something else is in the lock file's place, and OSError
    when the lock file cannot be opened.
    """
    root = acquire_root(layer, exclusive=False, wait_s=max(wait_s, _ROOT_WAIT_S))
    try:
        lease = _acquire(entry_lock_path(layer, key), exclusive=exclusive, wait_s=wait_s)
    except BaseException:
        root.close()
        raise
    lease.fds, root.fds = lease.fds + root.fds, []
    return lease


def acquire_root(layer: Layer, *, exclusive: bool, wait_s: float) -> Lease:
    """Takes the lock of the whole root; raises what `acquire_entry` does."""
    return _acquire(root_lock_path(layer), exclusive=exclusive, wait_s=wait_s)


def holder_of(layer: Layer, key: str) -> Holder | None:
    """Who holds an entry's lock, or that of the whole root, exclusively right now; None when nobody does, or it cannot be told."""
    return _holder(entry_lock_path(layer, key)) or _holder(root_lock_path(layer))


def readers_of(layer: Layer, key: str) -> LockBusy | None:
    """What `acquire_entry` raises where readers keep an entry's lock from being exclusive, found without making a lock file; else None."""
    path = entry_lock_path(layer, key)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode) or _try(fd, fcntl.LOCK_EX, release=True) or not _try(fd, fcntl.LOCK_SH, release=True):
            return None
        return _busy(path, fd, 0.0)
    except OSError:
        return None
    finally:
        os.close(fd)


def _holder(path: str) -> Holder | None:
    try:
        # Non-blocking: opening a FIFO to read would wait for somebody to write.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode) or _try(fd, fcntl.LOCK_SH):
            return None
        return _read_holder(fd) or Holder(0, "unknown host", "an unknown time")
    except OSError:
        return None
    finally:
        os.close(fd)


def _acquire(path: str, *, exclusive: bool, wait_s: float) -> Lease:
    deadline = time.monotonic() + wait_s
    pause, only_readers = 0.005, 0
    while True:
        fd = _open(path, exclusive=exclusive)
        try:
            while not _try(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH):
                only_readers = only_readers + 1 if exclusive and _try(fd, fcntl.LOCK_SH, release=True) else 0
                if time.monotonic() >= deadline or only_readers >= _READERS_SEEN:
                    raise _busy(path, fd, wait_s)
                time.sleep(pause * (0.5 + time.monotonic_ns() % 1000 / 1000))  # jitter, so that waiters do not poll in step
                pause = min(pause * 1.6, 0.2)
            if _still_there(fd, path):
                if exclusive:
                    _write_holder(fd)
                return Lease([fd], exclusive, os.getpid())
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # unlinked by prune --locks between open and lock: take the new file


def _open(path: str, *, exclusive: bool) -> int:
    try:
        fd = _open_or_make(path, exclusive=exclusive)
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
            raise
        raise _not_a_lock(path, os.lstat(path).st_mode) from None
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise _not_a_lock(path, mode)
    return fd


def _open_or_make(path: str, *, exclusive: bool) -> int:
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_RDWR)
    except FileNotFoundError:
        pass
    except OSError as error:
        if exclusive or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return os.open(path, flags | os.O_RDONLY)
    # Readable to whoever may enter the folder, whatever the umask: readers of a shared root share the lock.
    mode = 0o644 if os.stat(os.path.dirname(path)).st_mode & 0o005 == 0o005 else 0o600  # noqa: PTH116, PTH120
    fd = os.open(path, flags | os.O_RDWR | os.O_CREAT, mode)
    if os.fstat(fd).st_uid == os.geteuid():
        os.fchmod(fd, mode)
    return fd


def _not_a_lock(path: str, mode: int) -> NotALockFile:
    return NotALockFile(f"{path} is {kind_of(mode)}, expected a lock file", hint=f"ls -ld {shlex.quote(path)}; remove it and run the command again")


def kind_of(mode: int) -> str:
    """What a file's mode says it is, with its article."""
    for test, kind in (
        (stat.S_ISREG, "a regular file"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if test(mode):
            return kind
    return "a device"


def _try(fd: int, operation: int, *, release: bool = False) -> bool:
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if release:
        fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def _still_there(fd: int, path: str) -> bool:
    try:
        named = os.lstat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)


def _write_holder(fd: int) -> None:
    holder = Holder(os.getpid(), os.uname().nodename, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode(holder) + b"\n", 0)
    except OSError as error:
        if error.errno != errno.ENOSPC:  # on a full disk the lock itself still holds
            raise


def _read_holder(fd: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(fd, 4096, 0), type=Holder)
    except (msgspec.MsgspecError, ValueError):
        return None


def _busy(path: str, fd: int, wait_s: float) -> LockBusy:
    pids = lockers(fd)
    if _try(fd, fcntl.LOCK_SH, release=True):
        who = f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}" if pids else "another process"
        return LockBusy(path, None, f"{path} is in use by {who}", "it stays in use until that process ends; stop it or leave the entry as it is")
    holder = _read_holder(fd)
    if holder is None:
        who = f"process {pids[0]}" if pids else "a process that did not write its name into it"
    else:
        who = holder.label()
        if holder.host == os.uname().nodename and pids and holder.pid not in pids:
            who += f" (held now by process {pids[0]})"
    waited = f" after {wait_s:g} s" if wait_s else ""
    return LockBusy(path, holder, f"{path} is still held by {who}{waited}", "wait for it to finish, or end it; its lock goes with it")


def lockers(fd: int) -> list[int]:
    """Processes that hold a flock lock on the file, as far as this PID namespace shows them."""
    inode = str(os.fstat(fd).st_ino)
    try:
        with open("/proc/locks", encoding="ascii") as table:
            rows = [line.split() for line in table]
    except OSError:
        return []
    found = {int(row[4]) for row in rows if len(row) >= 6 and row[1] == "FLOCK" and row[5].split(":")[-1] == inode and row[4].isdigit()}
    return sorted(found - {0})
