"""Where a bundle is: a local file, or whatever fsspec reaches by a URL (s3://, gs://, https://, memory://)."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mlactl.cache import trust
from mlactl.cache.bundle.redaction import bare_url, is_url, nearly_url, without_secrets
from mlactl.errors import CannotRun, EnvironmentUnfit, MlactlError, UsageError
from mlactl.printable import plain, shell_word
from mlactl.regular_files import open_regular, replacing, require_target


def shown(where: str) -> str:
    """A path or URL for messages, without the credentials that a URL may carry, nor those of one that was mistyped."""
    return plain(bare_url(where)) if is_url(where) or _mistyped(where) else plain(where)


def _mistyped(where: str) -> bool:
    """Whether a place that is not there was meant as a URL: by its protocol, or by what looks like credentials."""
    nearly = nearly_url(where)
    if nearly is None or os.path.lexists(where):
        return False
    protocol, rest = nearly
    colon, userinfo = where[len(protocol)] in ":;", "@" in rest
    if userinfo and (colon or ":" in rest.partition("@")[0]):
        return True
    if not colon and not userinfo:
        return False  # `out//x`
    from fsspec.registry import known_implementations

    return protocol.lower() in known_implementations


@contextmanager
def source(where: str) -> Iterator[BinaryIO]:
    """The bundle's bytes; raises CannotRun, UsageError or EnvironmentUnfit (the package of a URL's filesystem is missing).

    What goes wrong while it is read is a CannotRun that names the place.
    """
    remote = _remote(where)
    if remote is None:
        with open_regular(_local(where)) as (descriptor, _), os.fdopen(descriptor, "rb", closefd=False, buffering=0) as file:
            yield guarded(file, where)
        return
    filesystem, path = remote
    try:
        file = filesystem.open(path, "rb")
    except Exception as error:
        raise _failed(where, "read", error) from None
    try:
        yield guarded(file, where)
    finally:
        with contextlib.suppress(Exception):  # all of it has been read and checked, or an error is on its way
            file.close()


def guarded(file: BinaryIO, where: str) -> BinaryIO:
    """The same bytes; a read that fails says of what."""
    return _Reader(file, where)  # type: ignore[return-value]


class _Reader:
    def __init__(self, file: BinaryIO, where: str) -> None:
        self._file, self._where = file, where

    def read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except Exception as error:  # a remote filesystem raises whatever its client does
            raise _failed(self._where, "read", error) from None


def require_free(where: str, *, force: bool) -> None:
    """Raises before any work is done what `deliver` would: UsageError for something that is there already, CannotRun."""
    remote = _remote(where)
    if remote is None:
        target = _local(where)
        require_target(target)
        if not force and os.path.lexists(target):
            raise _taken(where)
        if not target.parent.is_dir():
            raise CannotRun(f"{plain(target.parent)} is no folder, so {plain(target.name)} cannot be written there", hint=f"mkdir -p {target.parent}")
        return
    filesystem, path = remote
    try:
        there = filesystem.exists(path)
    except Exception as error:
        raise _failed(where, "look at", error) from None
    if there and not force:
        raise _taken(where)


def scratch_folder(where: str | None) -> str:
    """Where to put what goes there afterwards: beside a local target, else (None is stdout) where temporaries go. Raises CannotRun."""
    if where is not None and _remote(where) is None:
        return str(_local(where).parent)
    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise CannotRun(f"no folder for temporaries: {error.strerror}", hint=_OTHER_TEMPORARY) from None


_OTHER_TEMPORARY = "TMPDIR=DIR names another folder for temporaries"


def deliver(where: str, write: Callable[[BinaryIO], None], *, force: bool) -> None:
    """Writes a file that is complete whenever it is there, as far as a remote filesystem can promise that.

    Local: a temporary beside it, flushed, renamed. Remote: within a transaction of the filesystem, which fsspec commits
    at the end (an object store shows an upload when it is complete). Raises UsageError and CannotRun.
    """
    remote = _remote(where)
    if remote is None:
        target = _local(where)
        try:
            with replacing(target, force=force) as file:
                write(file)
        except CannotRun as error:
            if isinstance(error.__cause__, OSError):
                raise unwritable(where, error.__cause__) from error.__cause__
            raise
        return
    filesystem, path = remote
    if not force:
        require_free(where, force=force)
    try:
        with filesystem.transaction, filesystem.open(path, "wb") as file:
            write(file)
    except Exception as error:
        raise _failed(where, "write", error) from None


def unwritable(where: str | None, error: OSError) -> CannotRun:
    """The error for a bundle that cannot be written in its `scratch_folder`: names that with owner and mode, and what to do."""
    folder = scratch_folder(where)
    local = where is not None and _remote(where) is None
    look = "df -h" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "ls -ld"
    other = "mlactl cache export -o FILE puts it into another folder" if local else _OTHER_TEMPORARY
    return CannotRun(
        f"cannot write the bundle in {trust.describe(Path(folder).absolute())}: {error.strerror or error}",
        hint=f"{look} {shell_word(folder)}; {other}",
    )


def _local(where: str) -> Path:
    return Path(where.removeprefix("file://"))


def _remote(where: str) -> tuple[Any, str] | None:
    """fsspec's filesystem and the path in it; None for a local file, `file://` included."""
    if where.startswith("file://"):
        return None
    if not is_url(where):
        if _mistyped(where):
            raise UsageError(
                f"{shown(where)}: is no file that is there, and no URL: expected PROTOCOL://…", hint="a new local file is named as ./FILE"
            )
        return None
    from fsspec.core import url_to_fs
    from fsspec.registry import known_implementations

    try:
        filesystem, path = url_to_fs(where)
    except ImportError as error:
        chained = [part.partition("://")[0] for part in where.split("::")]
        protocol = next((name for name in chained if known_implementations.get(name, {}).get("err") == str(error)), None)
        said = plain(without_secrets(str(error), where))
        raise EnvironmentUnfit(
            f"{shown(where)}: {protocol or chained[0]}:// needs a package that is not installed: {said}",
            hint=(_install_command(protocol, str(error)) if protocol else None) or "install what it asks for, or name a local file",
        ) from None
    except ValueError as error:
        raise UsageError(f"{shown(where)}: {plain(without_secrets(str(error), where))}", hint="a local file is named as /path/to/FILE") from None
    except Exception as error:
        raise _failed(where, "reach", error) from None
    return filesystem, path


_SAID = re.compile(r"[Ii]nstall (?:the )?([a-z][\w.-]*)(?: package)? (?:to |for |and )|requires \"?([a-z][\w.-]*)\"? to be installed")
"""How fsspec's own table of filesystems names the one package that each needs."""

_EXTRAS = {"https": "http", "arrow_hdfs": "arrow"}
"""Protocols that an extra of fsspec under another name is for."""


def _install_command(protocol: str, said: str) -> str | None:
    """The pip command for a filesystem of fsspec's, `said` being what its table says of it; None where neither that nor an extra names a package."""
    from importlib.metadata import metadata

    found = _SAID.search(said)
    if found:
        return f"pip install {found[1] or found[2]}"
    extra = _EXTRAS.get(protocol, protocol)
    return f"pip install 'fsspec[{extra}]'" if extra in (metadata("fsspec").get_all("Provides-Extra") or ()) else None


def _taken(where: str) -> UsageError:
    return UsageError(f"{shown(where)}: is there already, nothing was written", hint="--force replaces it")


def _failed(where: str, what: str, error: Exception) -> MlactlError:
    """What went wrong at a place; to be raised `from None`, because the client's own error may hold credentials."""
    if isinstance(error, MlactlError):
        return error
    if isinstance(error, FileNotFoundError) and what == "read":
        return CannotRun(f"{shown(where)}: there is nothing", hint="check the URL, and what may be read with these credentials")
    said = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return CannotRun(
        f"cannot {what} {shown(where)}: {plain(without_secrets(said, where))}",
        hint="check the URL, and what may be reached from here with these credentials",
    )
