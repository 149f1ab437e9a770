"""Setting an entry of our own store aside, so that nothing loads it and nothing is lost, and putting it back.

A quarantined entry has its manifest under another name, `<key>.quarantined`: without the commit marker it is a miss.
Both ways are one rename under the entry's exclusive lock, which is not waited for.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from mlactl.cache import locks, trust
from mlactl.cache.entry import Entry, Status, examine, read_entry, why_no_manifest
from mlactl.cache.reading import not_regular
from mlactl.cache.roots import LAYOUT
from mlactl.errors import CannotRun


def set_aside(entry: Entry) -> None:
    """Quarantines an entry that is in place, whatever state its object is in.

    Raises LockBusy naming who uses it, and CannotRun for a read-only layer, a folder that cannot be written, or an entry
    that is not what it was when it was looked at.
    """
    with _locked(entry) as bucket:
        now = read_entry(entry.layer, entry.key)
        if now is None or now.manifest is None or now.status is Status.QUARANTINED or now.manifest != entry.manifest:
            found = "gone" if now is None else now.status if now.status is not Status.OK else "another one by now"
            raise CannotRun(f"{entry.key} is not the entry that was looked at: it is {found}", hint=f"mlactl cache audit {entry.key}")
        _rename(entry, bucket, "json", "quarantined")


def put_back(entry: Entry) -> None:
    """Undoes `set_aside` when the object passes the full check; what it does is not judged here.

    Raises what `set_aside` does, and CannotRun when the entry is not quarantined or its object is damaged.
    """
    with _locked(entry) as bucket:
        now = read_entry(entry.layer, entry.key)
        if now is None or now.status is not Status.QUARANTINED:
            raise CannotRun(f"{entry.key} is not quarantined: it is {now.status if now else 'gone'}", hint="mlactl cache ls --status quarantined")
        if now.manifest != entry.manifest:
            raise CannotRun(f"{entry.key} is not the entry that was looked at: it is another one by now", hint=f"mlactl cache audit {entry.key}")
        checked = in_place(now)
        if checked.status is not Status.OK:
            raise CannotRun(
                f"{entry.key} stays quarantined: its object is not intact: {checked.status}: {checked.detail}",
                hint=f"mlactl warmup --profile PROFILE compiles it again; mlactl cache rm {entry.key} forgets it",
            )
        if os.path.lexists(f"{entry.layer.bucket(entry.key)}/{entry.key}.json"):
            raise CannotRun(f"{entry.key} has a manifest in its place already", hint=f"mlactl cache show {entry.key}")
        _rename(entry, bucket, "quarantined", "json")


def in_place(entry: Entry) -> Entry:
    """A quarantined entry with the status that the full check would give it were it put back."""
    if entry.manifest is None:
        status, detail = why_no_manifest(str(entry.manifest_path), entry.key)
        if status is Status.OK:
            status, detail = Status.UNREADABLE, "its manifest was replaced while it was looked at"
        return msgspec.structs.replace(entry, status=status, detail=detail)
    return examine(msgspec.structs.replace(entry, status=Status.OK, detail=""))


@contextmanager
def _locked(entry: Entry) -> Iterator[int]:
    """A descriptor of the entry's folder, no step below the root being a link, while its exclusive lock is held."""
    layer, key = entry.layer, entry.key
    if not layer.writable:
        raise CannotRun(
            f"{key} is in the read-only layer {layer.path}", hint=f"mlactl cache audit {key} --cache-dir {shlex.quote(str(layer.path))} --quarantine"
        )
    fds: list[int] = []
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        fds.append(os.open(layer.path, flags))
        for part in (LAYOUT, key[:2]):
            fds.append(os.open(part, flags | os.O_NOFOLLOW, dir_fd=fds[-1]))
        with locks.entry_lock(layer, key, exclusive=True, wait_s=0.0):
            yield fds[-1]
    except OSError as error:
        where = layer.bucket(key)
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise CannotRun(f"{where} is not a folder of this root but behind a link, which is never followed", hint=f"ls -ld {where}") from None
        raise CannotRun(
            f"cannot write {trust.describe(where)}: {error.strerror or error}",
            hint="run it as the owner of the root",
        ) from error
    finally:
        for fd in fds:
            os.close(fd)


def _rename(entry: Entry, bucket: int, old: str, new: str) -> None:
    source, target = f"{entry.key}.{old}", f"{entry.key}.{new}"
    mode = os.stat(source, dir_fd=bucket, follow_symlinks=False).st_mode
    if not stat.S_ISREG(mode):
        raise CannotRun(f"{entry.layer.bucket(entry.key)}/{source} is {not_regular(mode)}, left alone", hint=f"ls -l {entry.layer.bucket(entry.key)}")
    os.rename(source, target, src_dir_fd=bucket, dst_dir_fd=bucket)
    os.fsync(bucket)
