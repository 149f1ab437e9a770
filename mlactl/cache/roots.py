"""Where the cache lives: one writable layer and any number of read-only ones below it."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlactl.errors import CannotRun, UsageError

LAYOUT = "v1"
"""Folder of the on-disk format inside a root."""

_NETWORK_FILESYSTEMS = {
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "glusterfs",
    "gpfs",
    "lustre",
    "nfs",
    "nfs4",
    "orangefs",
    "smb3",
    "smbfs",
    "virtiofs",
    "wekafs",
}
_NETWORK_FUSE = {"ceph", "gcsfuse", "glusterfs", "juicefs", "s3fs", "sshfs", "weka"}


@dataclass(frozen=True, slots=True)
class Layer:
    """One root folder, as an absolute path; `writable` says whether this tool may write there at all, not whether it can."""

    path: Path
    writable: bool

    def folder(self) -> str:
        """The folder that holds the buckets."""
        return f"{self.path}/{LAYOUT}"

    def bucket(self, key: str) -> str:
        """The folder of one entry's files."""
        return f"{self.path}/{LAYOUT}/{key[:2]}"


@dataclass(frozen=True, slots=True)
class Roots:
    """Layers in the order they are searched; at most the first is writable."""

    layers: tuple[Layer, ...]

    @property
    def writable(self) -> Layer | None:
        """The layer that objects are published to."""
        return next((layer for layer in self.layers if layer.writable), None)

    def require_writable(self) -> Layer:
        """The layer that objects are published to and removed from; raises CannotRun when there is none."""
        if self.writable is None:
            paths = ", ".join(str(layer.path) for layer in self.layers)
            raise CannotRun(
                f"every layer is read-only: {paths}", hint="put a writable root first: --cache-dir DIR or MLACTL_CACHE_DIR=/writable:/readonly"
            )
        return self.writable


def resolve(cache_dir: str | None = None, environ: Mapping[str, str] = os.environ) -> Roots:
    """The layers to use: `cache_dir`, else MLACTL_CACHE_DIR (both `rw:ro1:ro2`), else $XDG_CACHE_HOME/mlactl, else ~/.cache/mlactl.

    An empty first part (`:/shared/ro`) leaves nothing writable. An empty variable counts as unset, as the XDG base
    directory specification has it; an empty `cache_dir` does not: it is a shell variable that was meant to be set.
    Raises UsageError for a list without any path, and CannotRun when a home folder is needed and there is none.
    """
    listed = cache_dir if cache_dir is not None else environ.get("MLACTL_CACHE_DIR") or None
    if listed is None:
        xdg = environ.get("XDG_CACHE_HOME", "")
        # The same specification: relative paths are to be ignored.
        base = Path(xdg) if xdg.startswith("/") else _home(environ) / ".cache"
        return Roots((Layer(base / "mlactl", True),))
    parts = listed.split(":")
    layers = tuple(Layer(_absolute(part, environ), number == 0) for number, part in enumerate(parts) if part)
    if not layers:
        raise UsageError(f"cache directory list {listed!r} names no path", hint="--cache-dir or MLACTL_CACHE_DIR: /writable:/readonly1:/readonly2")
    return Roots(layers)


def _absolute(part: str, environ: Mapping[str, str]) -> Path:
    """A listed path; `~` is this user's home folder, links stay as they are (they are checked when something is loaded)."""
    if part == "~" or part.startswith("~/"):
        part = f"{_home(environ)}{part[1:]}"
    return Path(os.path.abspath(os.path.expanduser(part)))  # noqa: PTH100, PTH111


def home_of(environ: Mapping[str, str]) -> str | None:
    """This user's home folder as it is written down: HOME, else what the user database says; None where neither says one."""
    if environ.get("HOME"):
        return environ["HOME"]
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None


def _home(environ: Mapping[str, str]) -> Path:
    """`home_of`; raises CannotRun for none and for a relative one."""
    home = home_of(environ)
    if home is None:
        found = f"HOME is not set and uid {os.getuid()} is not in the user database"
        raise CannotRun(f"no home folder to keep the cache in: {found}", hint=_NAME_ONE)
    if not home.startswith("/"):
        raise CannotRun(f"no home folder to keep the cache in: HOME is {home!r}, expected an absolute path", hint=_NAME_ONE)
    return Path(home)


_NAME_ONE = "name a root: --cache-dir DIR, or MLACTL_CACHE_DIR=DIR"


def warnings(roots: Roots, mountinfo: Path = Path("/proc/self/mountinfo")) -> list[str]:
    """What a person should know about these layers before relying on them; one line each."""
    found = []
    for layer in roots.layers:
        kind = filesystem(layer.path, mountinfo)
        if is_network(kind):
            found.append(
                f"{layer.path} is on a network filesystem ({kind}): locks and renames may not hold between machines; prefer a local MLACTL_CACHE_DIR"
            )
        closed = closed_above(layer.path)
        if closed is not None:
            found.append(f"{layer.path} is shared, but {closed} above it lets no other user through; share a root elsewhere")
    return found


def closed_above(path: Path) -> Path | None:
    """For a root that others may read, the nearest folder above that keeps them from reaching it."""
    try:
        if path.stat().st_mode & 0o005 != 0o005:
            return None
        return next((parent for parent in path.parents if not parent.stat().st_mode & 0o001), None)
    except OSError:
        return None


def is_network(kind: str) -> bool:
    """Whether a filesystem type keeps its files on another machine."""
    return kind in _NETWORK_FILESYSTEMS or kind.removeprefix("fuse.") in _NETWORK_FUSE


def filesystem(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """Filesystem type that `path` is (or would be) on; empty when the kernel does not say."""
    found = _mount(path, mountinfo)
    return found[0] if found is not None else ""


def _mount(path: Path, mountinfo: Path) -> tuple[str, str] | None:
    """(filesystem type, options) of the mount that `path` is or would be on; None when the kernel does not say."""
    real = os.path.realpath(path)
    best, found = "", None
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 6 or not after:
            continue
        mount = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        # `>=`: of two mounts on one folder the later one is what is seen.
        if inside and len(mount) >= len(best):
            best, found = mount, (after.split(" ")[0], fields[5])
    return found


_KEEP_ACCESS_TIMES = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs"}


def keeps_access_times(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether files below `path` tell when they were last read, to the day: a local filesystem that is not mounted noatime.

    Network filesystems and overlays answer with times of another layer or of a cache, which would call used files unused.
    """
    found = _mount(path, mountinfo)
    return found is not None and found[0] in _KEEP_ACCESS_TIMES and "noatime" not in found[1].split(",")
