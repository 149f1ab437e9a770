"""Setting entries of our own store aside."""

from __future__ import annotations

from mlactl.cache.entry import Entry


def set_aside(entry: Entry) -> None:
    """Renames the manifest, which is what makes an entry one."""
    raise NotImplementedError


def put_back(entry: Entry) -> None:
    """Undoes `set_aside`."""
    raise NotImplementedError
