"""Whose files may be loaded: loading an object runs its code.

Trusted owners are this user and root; the root, bucket, files and every ancestor must not be writable by others (an
ancestor with the sticky bit aside). MLACTL_TRUST_ROOT lists folders that are trusted all the same.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from mlactl.errors import CannotRun


class Untrusted(CannotRun):
    """A file or folder that somebody else could have written; names it with owner and mode."""


def exempt(root: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether MLACTL_TRUST_ROOT (`path:path`) covers this root."""
    listing = environ.get("MLACTL_TRUST_ROOT")
    if not listing:
        return False
    real = os.path.realpath(root)
    for listed in listing.split(":"):
        if listed.startswith("/"):
            trusted = os.path.realpath(listed)
            if real == trusted or real.startswith(trusted.rstrip("/") + "/"):
                return True
    return False


def check_folders(bucket: str, root: str) -> None:
    """Checks a bucket, its root and every folder above, links on the way included; raises Untrusted naming the first that fails.

    A folder that does not exist is no problem: then there is nothing to load either.
    """
    if exempt(root):
        return
    inside = Path(os.path.realpath(root))
    for path in _steps(Path(bucket)):
        try:
            info = path.lstat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise Untrusted(f"{path} cannot be checked: {error.strerror}") from None
        check(path, info, sticky_ok=not path.is_relative_to(inside))


def check(path: str | Path, info: os.stat_result, *, sticky_ok: bool = False) -> None:
    """Checks owner and mode of one file or folder; raises Untrusted."""
    if info.st_uid not in (0, os.geteuid()):
        raise _untrusted(path, info, f"expected it to be owned by root or by {user_name(os.geteuid())}")
    if stat.S_ISLNK(info.st_mode):
        return  # a link has no mode of its own; its owner and its folder are checked
    if info.st_mode & 0o022 and not (sticky_ok and info.st_mode & stat.S_ISVTX):
        raise _untrusted(path, info, "expected that nobody but its owner may write it")


def describe(path: str | Path) -> str:
    """`/path (owner alice (uid 1000), mode 0755)` for messages, with the nearest folder above where `path` cannot be looked at."""
    path = Path(path)
    for probe in (path, *path.parents):
        try:
            info = probe.stat()
        except OSError:
            continue  # missing, or below a folder that this user may not enter: that folder is the one to name
        what = f"owner {user_name(info.st_uid)}, mode {stat.S_IMODE(info.st_mode):04o}"
        return f"{path} ({what})" if probe == path else f"{path} (in {probe}: {what})"
    return str(path)


def _untrusted(path: str | Path, info: os.stat_result, expected: str) -> Untrusted:
    mode = stat.S_IMODE(info.st_mode)
    fix = f"chmod go-w {path}" if info.st_uid in (0, os.geteuid()) else "use a cache of your own (MLACTL_CACHE_DIR)"
    return Untrusted(
        f"{path} is not trusted: owner {user_name(info.st_uid)}, mode {mode:04o}; {expected}, because loading an object runs its code",
        hint=f"{fix}, or name the root in MLACTL_TRUST_ROOT if this is meant",
    )


def user_name(uid: int) -> str:
    """`alice (uid 1000)`, or the number alone where the user database has no name for it."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _steps(path: Path, depth: int = 0) -> Iterator[Path]:
    """Every path that resolving an absolute `path` passes through, from / down, symbolic links and what they point at included."""
    if depth > 40:
        raise Untrusted(f"{path} passes through too many symbolic links")
    at = Path("/")
    yield at
    for part in path.parts[1:]:
        at = at.parent if part == ".." else at / part
        yield at
        try:
            target = at.readlink()
        except OSError:
            continue
        yield from _steps(at.parent / target, depth + 1)
        at = Path(os.path.realpath(at))
