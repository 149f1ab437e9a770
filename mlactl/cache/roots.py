"""Where the cache lives: one writable layer and any number of read-only ones below it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlactl.errors import UsageError

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


def resolve(cache_dir: str | None = None, environ: Mapping[str, str] = os.environ) -> Roots:
    """The layers to use: `cache_dir`, else MLACTL_CACHE_DIR (both `rw:ro1:ro2`), else $XDG_CACHE_HOME/mlactl, else ~/.cache/mlactl.

    An empty first part (`:/shared/ro`) leaves nothing writable. Raises UsageError for a list without any path.
    """
    listed = cache_dir if cache_dir is not None else environ.get("MLACTL_CACHE_DIR")
    if not listed:
        xdg = environ.get("XDG_CACHE_HOME", "")
        # The XDG base directory specification: relative paths are to be ignored.
        base = Path(xdg) if xdg.startswith("/") else Path(environ.get("HOME") or Path.home()) / ".cache"
        return Roots((Layer(base / "mlactl", True),))
    parts = listed.split(":")
    layers = tuple(
        Layer(Path(os.path.abspath(os.path.expanduser(part))), number == 0)  # noqa: PTH100, PTH111  not resolve(): links are checked later
        for number, part in enumerate(parts)
        if part
    )
    if not layers:
        raise UsageError(f"cache directory list {listed!r} names no path", hint="MLACTL_CACHE_DIR=/writable:/readonly1:/readonly2")
    return Roots(layers)


def warnings(roots: Roots, mountinfo: Path = Path("/proc/self/mountinfo")) -> list[str]:
    """What a person should know about these layers before relying on them; one line each."""
    found = []
    for layer in roots.layers:
        kind = filesystem(layer.path, mountinfo)
        if kind in _NETWORK_FILESYSTEMS or kind.removeprefix("fuse.") in _NETWORK_FUSE:
            found.append(
                f"{layer.path} is on a network filesystem ({kind}): locks and renames may not hold between machines; prefer a local MLACTL_CACHE_DIR"
            )
        closed = _closed_above(layer.path)
        if closed is not None:
            found.append(f"{layer.path} is shared, but {closed} above it lets no other user through; share a root elsewhere")
    return found


def _closed_above(path: Path) -> Path | None:
    """For a root that others may read, the nearest folder above that keeps them from reaching it."""
    try:
        if path.stat().st_mode & 0o005 != 0o005:
            return None
        return next((parent for parent in path.parents if not parent.stat().st_mode & 0o001), None)
    except OSError:
        return None


def filesystem(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """Filesystem type that `path` is (or would be) on; empty when the kernel does not say."""
    real = os.path.realpath(path)
    best, kind = "", ""
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        mount = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        # `>=`: of two mounts on one folder the later one is what is seen.
        if inside and len(mount) >= len(best):
            best, kind = mount, after.split(" ")[0]
    return kind
