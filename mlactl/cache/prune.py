"""Removing entries: a plan says what would go and why, applying it removes that and nothing else.

A plan is plain data and its JSON is what `--dry-run` prints. Applying believes none of it blindly: each file must still
be the planned one (inode, size and modification time), lie in a real folder of the root, and be locked by nobody.
Manifest first, then object: a removal cut short leaves an object without its commit marker, which is a miss.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mlactl.cache import listing, locks, trust
from mlactl.cache import toolchain as toolchains
from mlactl.cache.roots import LAYOUT, Layer
from mlactl.cache.selectors import Selectors
from mlactl.cache.store import Entry, Store
from mlactl.errors import CannotRun, EnvironmentUnfit, Interrupted
from mlactl.kernels import registry
from mlactl.kernels.compiler import compile_options
from mlactl.kernels.spec import ARCHES, CompileSpec

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file as it was when the plan was made; `path` is relative to the root."""

    path: str
    inode: int
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class PlannedEntry:
    """An entry to remove: the fields of its listing row, why, and its files in the order they go."""

    key: str
    spec: dict[str, Any] | None
    status: str
    arch: str | None
    object_bytes: int | None
    created: str | None
    last_used: str | None
    reason: str
    files: tuple[PlannedFile, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """An entry that was selected and stays all the same."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What applying removes from one root.

    `selection` is how the entries were chosen, `locks` lock files relative
    to the root, `root_kernels` the ids and versions there are."""

    schema_version: int
    root: str
    planned: str
    selection: tuple[str, ...]
    entries: tuple[PlannedEntry, ...]
    kept: tuple[Kept, ...]
    locks: tuple[str, ...]
    freed_bytes: int
    root_entries: int
    root_bytes: int
    root_kernels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one planned entry or lock file that was not removed."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class PruneResult:
    """What was removed, what was left because it was in use or had changed, and what could not be removed."""

    removed: tuple[str, ...]
    freed_bytes: int
    skipped: tuple[Outcome, ...]
    failed: tuple[Outcome, ...]
    locks_removed: int


# ---- plan


def plan(
    store: Store,
    selectors: Selectors,
    *,
    keep: Iterable[CompileSpec] = (),
    now: float | None = None,
    on_problem: Callable[[str], None] | None = None,
) -> PrunePlan:
    """What the selectors choose in the writable root, less what `keep` names, with any toolchain and for any arch.

    A folder that is passed over is told to `on_problem`; an entry with a link or a folder in a file's place is kept.
    Raises CannotRun when nothing is writable or the root cannot be read, and EnvironmentUnfit when `--stale` is asked
    for where no compiler is installed to compare with.
    """
    layer = writable_layer(store)
    moment = time.time() if now is None else now
    everything = listing.collect(store, layers=[layer], on_problem=on_problem)
    judge = selectors.judge(moment, stale_judge() if selectors.stale else lambda _entry: None)
    protected = frozenset(keep)
    chosen: list[tuple[Entry, str]] = []
    kept: list[Kept] = []
    for entry in everything if selectors.selects_entries else ():
        reason = judge(entry)
        if reason is None:
            continue
        if protected and entry.manifest is not None and entry.manifest.spec in protected:
            kept.append(Kept(entry.key, "named by a kept profile"))
        else:
            chosen.append((entry, reason))
    if selectors.max_bytes is not None:
        chosen = _least_recent(chosen, listing.total_bytes(everything) - selectors.max_bytes)
    lock_files = tuple(_lock_files(layer)) if selectors.locks else ()
    return _plan(layer, selectors.words(), chosen, kept, lock_files, everything, moment)


def plan_keys(store: Store, entries: Iterable[Entry], *, now: float | None = None) -> PrunePlan:
    """The plan that removes these entries of the writable root; raises CannotRun for one of a read-only layer."""
    layer = writable_layer(store)
    chosen = []
    for entry in entries:
        if entry.layer != layer:
            raise CannotRun(
                f"{entry.key} is in the read-only layer {entry.layer.path}",
                hint=f"mlactl cache rm {entry.key} --cache-dir {shlex.quote(str(entry.layer.path))}",
            )
        chosen.append((entry, "named"))
    everything = listing.collect(store, layers=[layer])
    return _plan(layer, ("named",), chosen, [], (), everything, time.time() if now is None else now)


def writable_layer(store: Store) -> Layer:
    """The layer that removal works on; raises CannotRun when there is none."""
    layer = store.roots.writable
    if layer is None:
        paths = ", ".join(str(layer.path) for layer in store.roots.layers)
        raise CannotRun(f"every layer is read-only: {paths}", hint="name a writable root: --cache-dir DIR")
    return layer


def _plan(
    layer: Layer,
    selection: tuple[str, ...],
    chosen: list[tuple[Entry, str]],
    kept: list[Kept],
    lock_files: tuple[str, ...],
    everything: list[Entry],
    now: float,
) -> PrunePlan:
    entries = []
    for entry, reason in sorted(chosen, key=lambda item: listing.order_key(item[0])):
        files, stranger = _files(layer, entry)
        if stranger:
            kept = [*kept, Kept(entry.key, f"not a regular file, left alone: ls -ld {shlex.quote(stranger)}")]
        elif files:
            entries.append(PlannedEntry(**listing.as_json(entry), reason=reason, files=files))
    return PrunePlan(
        schema_version=SCHEMA_VERSION,
        root=str(layer.path),
        planned=listing.iso_time(now) or "",
        selection=selection,
        entries=tuple(entries),
        kept=tuple(kept),
        locks=lock_files,
        freed_bytes=sum(entry.object_bytes or 0 for entry in entries),
        root_entries=len(everything),
        root_bytes=listing.total_bytes(everything),
        root_kernels=listing.kernels_present(everything),
    )


def _least_recent(chosen: list[tuple[Entry, str]], excess_bytes: int) -> list[tuple[Entry, str]]:
    """The least recently used of the chosen whose removal frees the excess; what was never used counts from its making."""

    def last_use(item: tuple[Entry, str]) -> tuple[float, str]:
        entry = item[0]
        if entry.last_used is not None:
            return entry.last_used, entry.key
        return listing.timestamp(entry.manifest.created) if entry.manifest is not None else 0.0, entry.key

    taken = []
    for entry, reason in sorted(chosen, key=last_use):
        if excess_bytes <= 0:
            break
        if entry.object_bytes:
            taken.append((entry, reason))
            excess_bytes -= entry.object_bytes
    return taken


def stale_judge() -> Callable[[Entry], str | None]:
    """Tells why this install can no longer produce an entry of a current version; raises EnvironmentUnfit without a compiler."""
    tools = toolchains.current()
    if tools is None:
        raise EnvironmentUnfit(
            f"--stale compares with the compiler installed here, and there is none: {toolchains.absence()}",
            hint="select by version or age: mlactl cache prune --spec 'KERNEL<N', --older-than 30d",
        )
    digests: dict[str, str] = {}
    options = {arch: compile_options(arch) for arch in ARCHES}

    def judge(entry: Entry) -> str | None:
        manifest = entry.manifest
        if manifest is None:
            return None
        kernel_id = manifest.spec.kernel_id
        declared = registry.KERNELS.get(kernel_id)
        if declared is None or declared.version != manifest.spec.version:
            return None
        if kernel_id not in digests:
            digests[kernel_id] = registry.sources_digest(kernel_id)
        other = []
        if manifest.sources_digest != digests[kernel_id]:
            other.append("other sources")
        if manifest.toolchain != tools:
            other.append("other toolchain")
        if manifest.options != options[manifest.arch]:
            other.append("other compile options")
        return ", ".join(other) or None

    return judge


def _files(layer: Layer, entry: Entry) -> tuple[tuple[PlannedFile, ...], str | None]:
    """The entry's own regular files, manifest first, and the path of what is none (a link, a folder): nothing of ours."""
    found = []
    root = f"{layer.path}/"
    for path in (entry.manifest_path, entry.object_path):
        if path is None:
            continue
        name = str(path)
        try:
            status = os.lstat(name)
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(status.st_mode):
            return (), name
        found.append(PlannedFile(name.removeprefix(root), status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found), None


def _lock_files(layer: Layer) -> list[str]:
    """Entries' lock files, relative to the root, in order; the root's own lock is not among them."""
    if Path(layer.folder()).is_symlink():
        return []
    found = []
    for bucket in _items(layer.folder()):
        if _BUCKET.fullmatch(bucket.name) and bucket.is_dir(follow_symlinks=False):
            files = _items(bucket.path)
            found += [f"{LAYOUT}/{bucket.name}/{file.name}" for file in files if _LOCK.fullmatch(file.name) and file.is_file(follow_symlinks=False)]
    return found


def _items(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda item: item.name)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CannotRun(f"{trust.describe(folder)} cannot be read: {error.strerror}", hint="mlactl cache dir shows which roots are used") from None


# ---- apply

_BUCKET = re.compile(r"[0-9a-f]{2}")
_NAME = re.compile(r"[0-9a-f]{64}[.][A-Za-z0-9_.-]{1,100}")
_LOCK = re.compile(r"[0-9a-f]{64}[.]lock")


def apply(plan: PrunePlan, on_done: Callable[[int], None] = lambda _steps: None) -> PruneResult:
    """Removes what the plan names and reports on each entry; `on_done` counts finished ones.

    What is in use, has changed since the plan or is not recognised stays. Raises Interrupted on Ctrl-C, between two
    entries, saying what was finished, and CannotRun for a plan of another release.
    """
    if plan.schema_version != SCHEMA_VERSION:
        raise CannotRun(
            f"a plan of version {plan.schema_version}, this release applies {SCHEMA_VERSION}", hint="mlactl cache prune --dry-run makes a new one"
        )
    layer = Layer(Path(plan.root), writable=True)
    done = _Done()
    try:
        for entry in plan.entries:
            _account(done, entry.key, entry.object_bytes or 0, partial(_remove, layer, entry))
            on_done(1)
        if plan.locks:
            _remove_locks(layer, plan.locks, done)
    except KeyboardInterrupt:
        finished = len(done.removed) + len(done.skipped) + len(done.failed)
        raise Interrupted(
            f"interrupted: {finished} of {len(plan.entries)} entries were looked at, {len(done.removed)} removed; the cache is valid",
            hint="run the same command again for the rest",
        ) from None
    return PruneResult(tuple(done.removed), done.freed_bytes, tuple(done.skipped), tuple(done.failed), done.locks)


@dataclass(slots=True)
class _Done:
    removed: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    skipped: list[Outcome] = field(default_factory=list)
    failed: list[Outcome] = field(default_factory=list)
    locks: int = 0


def _account(done: _Done, key: str, size_bytes: int, remove: Callable[[], str | None]) -> None:
    """Runs one removal and files what became of it."""
    try:
        reason = remove()
    except locks.LockBusy as busy:
        done.skipped.append(Outcome(key, busy.message))
    except locks.NotALockFile as error:
        done.failed.append(Outcome(key, error.message))
    except OSError as error:
        where = trust.describe(str(error.filename)) if error.filename else key
        done.failed.append(Outcome(key, f"{where}: {error.strerror}"))
    else:
        if reason is None:
            done.removed.append(key)
            done.freed_bytes += size_bytes
        else:
            done.skipped.append(Outcome(key, reason))


def _remove(layer: Layer, entry: PlannedEntry) -> str | None:
    """Removes one entry under its exclusive lock; why it was left, or None."""
    bucket = f"{LAYOUT}/{entry.key[:2]}"
    names = [file.path.removeprefix(f"{bucket}/") for file in entry.files]
    if not names or any(not _NAME.fullmatch(name) or not name.startswith(f"{entry.key}.") or _LOCK.fullmatch(name) for name in names):
        return "not an entry of this cache"
    with _folder(layer, bucket) as folder:
        if folder is None:
            return "its folder is gone or is a link"
        with locks.entry_lock(layer, entry.key, exclusive=True, wait_s=0.0):
            if not all(_unchanged(folder, name, file) for name, file in zip(names, entry.files, strict=True)):
                return "changed or used since the plan was made"
            _unlink(folder, f"{layer.path}/{bucket}", names)
    return None


@contextmanager
def _folder(layer: Layer, bucket: str) -> Iterator[int | None]:
    """Descriptor of a bucket that is really inside the root: no step below the root may be a link."""
    fds: list[int] = []
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            fds.append(os.open(layer.path, flags))
            for part in bucket.split("/"):
                fds.append(os.open(part, flags | os.O_NOFOLLOW, dir_fd=fds[-1]))
        except (FileNotFoundError, NotADirectoryError):
            yield None
        except OSError as error:
            if error.errno != errno.ELOOP:
                error.filename = f"{layer.path}/{bucket}"
                raise
            yield None
        else:
            yield fds[-1]
    finally:
        for fd in fds:
            os.close(fd)


def _unchanged(folder: int, name: str, planned: PlannedFile) -> bool:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    found = (status.st_ino, status.st_size, status.st_mtime_ns)
    return stat.S_ISREG(status.st_mode) and found == (planned.inode, planned.size_bytes, planned.modified_ns)


def _unlink(folder: int, path: str, names: list[str]) -> None:
    """Removes the files in order; once the manifest is gone the rest goes too, Ctrl-C or not."""
    first, rest = names[0], names[1:]
    try:
        os.unlink(first, dir_fd=folder)
    except OSError as error:
        error.filename = path  # what forbids it is the folder's mode, not the file's
        raise
    finally:
        for name in rest if not _exists(folder, first) else ():
            os.unlink(name, dir_fd=folder)


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _remove_locks(layer: Layer, paths: tuple[str, ...], done: _Done) -> None:
    """Unlinks lock files while nobody in the whole root holds or waits for one."""

    def remove_all() -> None:
        with locks.root_lock(layer, exclusive=True, wait_s=0.0):
            for path in paths:
                _, bucket, name = path.split("/")
                if not (_BUCKET.fullmatch(bucket) and _LOCK.fullmatch(name)):
                    continue
                with _folder(layer, f"{LAYOUT}/{bucket}") as folder:
                    if folder is not None and _exists(folder, name):
                        os.unlink(name, dir_fd=folder)
                        done.locks += 1

    try:
        remove_all()
    except locks.LockBusy as busy:
        done.skipped.append(Outcome("locks", busy.message))
    except locks.NotALockFile as error:
        done.failed.append(Outcome("locks", error.message))
    except OSError as error:
        done.failed.append(Outcome("locks", f"{trust.describe(str(error.filename or layer.path))}: {error.strerror}"))
