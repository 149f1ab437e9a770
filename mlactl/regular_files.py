"""Reading and replacing what a person pointed at: regular files only, never a wait on a pipe, and reasons in words."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mlactl.errors import CannotRun, UsageError
from mlactl.printable import plain

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


def require_regular(path: Path) -> None:
    """Raises CannotRun for what is no readable regular file: before it is handed to a library that would wait on a pipe."""
    try:
        path.lstat()
    except FileNotFoundError:
        raise CannotRun(f"{plain(path)} does not exist", hint=f"ls -l {plain(path.parent)}") from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    with open_regular(path):
        pass


def read_bytes(path: Path, limit_bytes: int, what: str, hint: str | None = None) -> bytes:
    """Every byte of a small file; raises CannotRun when it cannot be read or has more than `limit_bytes` of `what`."""
    with open_regular(path) as (descriptor, size):
        if size > limit_bytes:
            raise CannotRun(f"{plain(path)}: {size} bytes, expected at most {limit_bytes} of {what}", hint=hint or f"ls -ld {plain(path)}")
        try:
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read(limit_bytes)
        except OSError as error:
            raise unreadable(path, error) from error


def sha256_of(path: Path) -> str:
    """The digest of a file of any size, read in blocks; raises CannotRun."""
    digest = hashlib.sha256()
    with open_regular(path) as (descriptor, _):
        try:
            with os.fdopen(descriptor, "rb", closefd=False, buffering=0) as file:
                while block := file.read(HASH_BLOCK_BYTES):
                    digest.update(block)
        except OSError as error:
            raise unreadable(path, error) from error
    return digest.hexdigest()


def require_target(target: Path, sources: Sequence[Path] = ()) -> None:
    """Raises UsageError for a target that is there and is no regular file, or is one of the `sources`; CannotRun."""
    try:
        state = target.stat()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise unreadable(target, error) from error
    if stat.S_ISDIR(state.st_mode):
        raise UsageError(f"{plain(target)}: is a folder, expected a file to write", hint=f"name a file in it, as {plain(target / 'NAME')}")
    if not stat.S_ISREG(state.st_mode):
        raise UsageError(f"{plain(target)}: is {_kind_of(state.st_mode)}, expected a file to write", hint="name a new file")
    for source in sources:
        with contextlib.suppress(OSError):
            if os.path.samestat(state, source.stat()):
                raise UsageError(f"{plain(target)}: is the same file as {plain(source)}, which is read", hint="name a new file")


def require_writable(target: Path, sources: Sequence[Path] = ()) -> None:
    """Refuses a file that could not be written after all the work; raises as `require_target`, and CannotRun for its folder."""
    require_target(target, sources)
    place = Path(os.path.realpath(target)).parent
    try:
        if not place.exists():
            raise CannotRun(f"{plain(target)}: there is no folder {plain(place)}", hint=f"mkdir -p {plain(place)}")
        if not stat.S_ISDIR(place.stat().st_mode):
            raise UsageError(f"{plain(target)}: {plain(place)} is no folder", hint=f"ls -ld {plain(place)}")
    except (OSError, ValueError) as error:
        raise unreadable(place, error) from error
    if not os.access(place, os.W_OK | os.X_OK):
        raise CannotRun(f"{plain(target)} cannot be written: permission denied in {plain(place)}", hint=f"ls -ld {plain(place)}")


def require_writable_folder(folder: Path) -> None:
    """Makes a folder where there is none; raises CannotRun where that fails or no file can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=folder)
        os.close(handle)
        Path(name).unlink()
    except (OSError, ValueError) as error:
        reason = unreadable(folder, error)
        raise CannotRun(f"{reason.message}; no file can be written there", hint=reason.hint) from error


def write_file(data: bytes, target: Path, *, force: bool, sources: Sequence[Path] = ()) -> None:
    """Writes a file that is complete whenever it is there; see `replacing`."""
    with replacing(target, force=force, sources=sources) as file:
        file.write(data)


@contextmanager
def replacing(target: Path, *, force: bool, sources: Sequence[Path] = ()) -> Iterator[BinaryIO]:
    """Gives a temporary beside the target, which it takes the place of when the block ends, and is gone when that fails.

    Only a regular file is ever replaced, and only with `force`; through a symbolic link it is the link's target. Raises
    UsageError for what must not be replaced and CannotRun for what cannot be written.
    """
    require_target(target, sources)
    taken = UsageError(f"{plain(target)}: is there already, nothing was written", hint="--force replaces it")
    if not force and os.path.lexists(target):
        raise taken
    place = Path(os.path.realpath(target)) if force else target
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if force:
            temporary.replace(place)
        else:
            # A rename would replace a file that somebody made meanwhile; a link does not.
            os.link(temporary, place)
    except FileExistsError as error:
        raise taken from error
    except OSError as error:
        raise unreadable(target, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


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
